// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "../core/bucket_plan.hpp"
#include "../core/math.hpp"
#include "cost_model.hpp"

namespace gradsync::inline v0_2::plan {

/// A gradient as a backward pass delivers it.
struct ReadyGradient {
    double ready = 0;  ///< seconds after the backward began
    std::size_t bytes = 0;

    friend constexpr bool operator==(ReadyGradient, ReadyGradient) = default;
};

/// Times of a bucket, in seconds: ready with its last gradient, started when the bucket before has ended.
struct BucketTime {
    double ready = 0, start = 0, end = 0;
    std::size_t bytes = 0;
};

/// Schedules buckets in order on one link, one collective at a time: start = max(ready, end of the bucket before). Reads `ready` and
/// `bytes` of each bucket and fills in `start` and `end`. Returns the end of the last one (0 if there are none).
inline double schedule(std::span<BucketTime> buckets, CallCost cost) noexcept {
    double free = 0;
    for (BucketTime& b : buckets) {
        b.start = gradsync::detail::larger(free, b.ready);
        b.end = free = b.start + cost.seconds(static_cast<double>(b.bytes));
    }
    return free;
}

/// The buckets of a plan, in its order. `gradients` are by parameter.
inline std::vector<BucketTime> buckets_of(std::span<const ReadyGradient> gradients, const BucketPlan& plan) {
    std::vector<BucketTime> buckets(plan.size());
    for (std::size_t b = 0; b < plan.size(); ++b)
        for (const std::size_t i : plan.bucket(b)) {
            buckets[b].bytes += gradients[i].bytes;
            buckets[b].ready = gradsync::detail::larger(buckets[b].ready, gradients[i].ready);
        }
    return buckets;
}

/// Buckets of consecutive gradients: bucket b ends before gradient `ends[b]`. `gradients` are in order of readiness.
inline std::vector<BucketTime> buckets_of(std::span<const ReadyGradient> gradients, std::span<const std::size_t> ends) {
    BucketPlan plan;
    std::vector<std::size_t> bucket;
    for (std::size_t i = 0, b = 0; b < ends.size(); ++b) {
        for (bucket.clear(); i < ends[b]; ++i) bucket.push_back(i);
        plan.push_back(bucket);
    }
    return buckets_of(gradients, plan);
}

}  // namespace gradsync::inline v0_2::plan
