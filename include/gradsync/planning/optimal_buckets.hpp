// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../bucket/size_capped.hpp"
#include "partition.hpp"

namespace gradsync::inline v0_2 {

/// The buckets whose communication finishes earliest, for gradients that become ready at known times and collectives of
/// known cost. Dynamic programming finds the optimum (see planning/partition.hpp); there is no size to choose.
///
/// Times are by parameter, in seconds from an origin at or before the first, and the same on all ranks. The cost is
/// that of an all-reduce of n bytes; `plan::calibrate` measures it. Without times the policy plans as SizeCappedBuckets
/// does by default. A Reducer measures times and plans anew: see `Reducer::rebuild_buckets`.
///
/// A bucket holds one kind (dtype, memory space). The optimum is over all ways to cut each kind and to interleave their
/// buckets on one link. If there are too many ways, the plan is the best of fewer (see `plan::optimal_buckets`).
class OptimalBuckets {
public:
    /// Throws Error(invalid_argument) if a number is negative or not finite.
    explicit OptimalBuckets(plan::CallCost cost, std::vector<double> ready_seconds = {})
        : cost_(cost), ready_(std::move(ready_seconds)) {
        plan::detail::check_amount("OptimalBuckets", "the cost of a call", cost.fixed);
        plan::detail::check_amount("OptimalBuckets", "the cost of a byte", cost.per_byte);
        for (const double r : ready_) plan::detail::check_amount("OptimalBuckets", "a time of readiness", r);
    }

    plan::CallCost cost() const noexcept { return cost_; }  ///< Returns the cost that it plans with.

    /// Times by parameter; empty if there are none.
    std::span<const double> ready_seconds() const noexcept { return {ready_.data(), ready_.size()}; }

    /// Sets the times for later plans. Throws as the constructor does.
    void set_ready_seconds(std::span<const double> ready_seconds) {
        *this = OptimalBuckets(cost_, {ready_seconds.begin(), ready_seconds.end()});
    }

    /// Throws Error(invalid_argument) if there are times for another number of parameters.
    BucketPlan plan(std::span<const ParameterInfo> parameters, std::span<const std::size_t> order) const {
        if (ready_.empty()) return SizeCappedBuckets().plan(parameters, order);
        if (ready_.size() != parameters.size())
            detail::refuse("OptimalBuckets", "there are times of readiness for ", ready_.size(),
                           " parameters, not for ", parameters.size(), "; measure them again for this model");
        std::array<std::size_t, ParameterInfo::kind_count> kind_of{};  // 1 + the kind's number; 0: not seen yet
        plan::KindedGradients gradients;
        gradients.kind_count = 0;
        double ready = 0;  // `order` takes precedence: a later gradient in it is not ready earlier
        for (const std::size_t i : order) {
            const ParameterInfo& p = parameters[i];
            std::size_t& kind = kind_of[p.kind()];
            if (kind == 0) kind = ++gradients.kind_count;
            ready = detail::larger(ready, ready_[i]);
            gradients.gradients.push_back({ready, p.bytes()});
            gradients.kinds.push_back(kind - 1);
        }
        const plan::KindedBuckets buckets = plan::optimal_buckets(gradients, cost_);
        return detail::plan_of(order, buckets.bucket_of, buckets.count);
    }

    /// "OptimalBuckets{fixed=4e-05, per_byte=1.6e-09}", with all digits of the numbers.
    std::string describe() const {
        return detail::text("OptimalBuckets{fixed=", detail::text_of(cost_.fixed),
                            ", per_byte=", detail::text_of(cost_.per_byte), "}");
    }

private:
    plan::CallCost cost_;
    std::vector<double> ready_;
};

static_assert(TimedBucketPolicy<OptimalBuckets>);

}  // namespace gradsync::inline v0_2
