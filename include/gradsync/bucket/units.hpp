// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../core/bucket_plan.hpp"
#include "../core/error.hpp"

namespace gradsync::inline v0_2 {

/// Parameters that are used together travel together: one bucket per unit (a layer, a block) and kind (dtype, memory space). Buckets are
/// launched in the order in which they become complete.
class Units {
public:
    /// `unit_of[i]` is the unit of parameter i, from 0. Units may be empty. Throws Error(invalid_argument) for a negative unit that was
    /// converted.
    explicit Units(std::vector<std::size_t> unit_of) : unit_of_(std::move(unit_of)) {
        for (const std::size_t unit : unit_of_) {
            if (unit > static_cast<std::size_t>(-1) / 2)
                throw Error(Errc::invalid_argument,
                            "Units: there is a parameter of unit " + std::to_string(static_cast<std::ptrdiff_t>(unit)) +
                                "; number units from 0, and give frozen parameters one, too",
                            {.operation = "Units"});
            count_ = unit < count_ ? count_ : unit + 1;
        }
    }

    std::size_t count() const noexcept { return count_; }          ///< of units
    std::size_t size() const noexcept { return unit_of_.size(); }  ///< parameters
    std::size_t unit_of(std::size_t i) const noexcept { return unit_of_[i]; }

    /// Throws Error(invalid_argument) unless there is a unit for each parameter.
    BucketPlan plan(std::span<const ParameterInfo> parameters, std::span<const std::size_t> order) const {
        if (parameters.size() != unit_of_.size())
            throw Error(
                Errc::invalid_argument,
                "Units: there are " + std::to_string(parameters.size()) + " parameters, but units for " + std::to_string(unit_of_.size()),
                {.operation = "Units"});
        struct Bucket {
            std::size_t kind;
            std::size_t last;  // the place in `order` of its last parameter
            std::vector<std::size_t> parameters;
        };
        std::vector<std::vector<Bucket>> units(count_);
        for (std::size_t at = 0; at < order.size(); ++at) {
            const std::size_t kind = parameters[order[at]].kind();
            std::vector<Bucket>& unit = units[unit_of_[order[at]]];
            std::size_t b = 0;
            while (b < unit.size() && unit[b].kind != kind) ++b;
            if (b == unit.size()) unit.push_back({kind, at, {}});
            unit[b].last = at;
            unit[b].parameters.push_back(order[at]);
        }
        std::vector<const Bucket*> ending(order.size(), nullptr);  // by place in `order`: the bucket that is complete there
        for (const auto& unit : units)
            for (const Bucket& bucket : unit) ending[bucket.last] = &bucket;
        BucketPlan plan;
        for (const Bucket* bucket : ending)
            if (bucket != nullptr) plan.push_back(bucket->parameters);
        return plan;
    }

    std::string describe() const { return "Units{" + std::to_string(count_) + "}"; }

    friend bool operator==(const Units&, const Units&) = default;

private:
    std::vector<std::size_t> unit_of_;
    std::size_t count_ = 0;
};

static_assert(BucketPolicy<Units>);

}  // namespace gradsync::inline v0_2
