// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <vector>

#include "assign_buckets.hpp"

namespace gradsync::inline v0_2 {

/// Parameters that are used together travel together: one bucket per unit (a layer, a block) and kind (dtype, memory
/// space). Buckets are launched in the order in which they become complete.
class Units {
public:
    /// `unit_of[i]` is the unit of parameter i, from 0. Units may be empty. Throws Error(invalid_argument) for a
    /// converted negative number.
    explicit Units(std::vector<std::size_t> unit_of) : unit_of_(std::move(unit_of)) {
        for (const std::size_t unit : unit_of_) {
            if (unit > static_cast<std::size_t>(-1) / 2)
                detail::refuse("Units", "there is a parameter of unit ", static_cast<std::ptrdiff_t>(unit),
                               "; number units from 0, and give frozen parameters one, too");
            count_ = unit < count_ ? count_ : unit + 1;
        }
    }

    std::size_t count() const noexcept { return count_; }                      ///< number of units
    std::size_t size() const noexcept { return unit_of_.size(); }              ///< number of parameters
    std::size_t unit_of(std::size_t i) const noexcept { return unit_of_[i]; }  ///< Returns the unit of parameter i.

    /// Throws Error(invalid_argument) unless there is a unit for each parameter.
    BucketPlan plan(std::span<const ParameterInfo> parameters, std::span<const std::size_t> order) const {
        if (parameters.size() != unit_of_.size())
            detail::refuse("Units", "there are ", parameters.size(), " parameters, but units for ", unit_of_.size());
        struct Bucket {
            std::size_t kind, number;
        };
        List<List<Bucket>> units(count_);
        List<std::size_t> bucket_of(order.size());  // by place in `order`
        std::size_t buckets = 0;
        for (std::size_t at = 0; at < order.size(); ++at) {
            const std::size_t kind = parameters[order[at]].kind();
            List<Bucket>& unit = units[unit_of_[order[at]]];
            std::size_t b = 0;
            while (b < unit.size() && unit[b].kind != kind) ++b;
            if (b == unit.size()) unit.push_back({kind, buckets++});
            bucket_of[at] = unit[b].number;
        }
        return detail::plan_of(order, bucket_of, buckets);
    }

    std::string describe() const { return detail::text("Units{", count_, "}"); }

private:
    std::vector<std::size_t> unit_of_;
    std::size_t count_ = 0;
};

static_assert(BucketPolicy<Units>);

}  // namespace gradsync::inline v0_2
