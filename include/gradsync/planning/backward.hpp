// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <vector>

#include "../core/bucket_plan.hpp"
#include "cost_model.hpp"

namespace gradsync::inline v0_2::plan {

/// A gradient as a backward pass delivers it.
struct ReadyGradient {
    double ready = 0;       ///< seconds after the backward began
    std::size_t bytes = 0;  ///< of the gradient
};

/// Times of a bucket, in seconds. It is ready with its last gradient, and starts when the bucket before it has ended.
struct BucketTime {
    /// In seconds: when the bucket is full, when its collective starts, and when it ends.
    double ready = 0, start = 0, end = 0;
    std::size_t bytes = 0;  ///< of its gradients
};

/// Schedules buckets in order on one link, one collective at a time: start = max(ready, end of the bucket before).
/// Reads `ready` and `bytes` of each bucket and fills in `start` and `end`. Returns the end of the
/// last one (0 if there are none).
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

/// The contention of compute and communication for the same cores, as over TCP. Each number is the share of its speed
/// that one keeps while the other is at work. 1 and 1 mean no contention.
///
/// Both follow from two measured steps: one with all communication after the backward ("apart"), and one with overlap
/// ("overlapped"). `hidden` is the time of the second step in which buckets were in flight and nothing waited:
/// `communication_seconds - exposed_seconds` of its statistics. `busy` is the time of the same calls when nothing else
/// runs. Measure with gradients that live in the buckets, because copies count as exposed.
///
///     compute = 1 - ((step - exposed)_overlapped - (step - exposed)_apart) / hidden
///     link    = (busy - exposed_overlapped) / hidden
struct Contention {
    double compute = 1;  ///< in (0, 1]
    double link = 1;     ///< in (0, 1]
};

/// Throws Error(invalid_argument) if a share is not in (0, 1].
inline void check(Contention contention) {
    for (const auto& [which, share] : {std::pair{"compute", contention.compute}, {"the link", contention.link}})
        if (!(share > 0 && share <= 1))
            gradsync::detail::refuse("Contention", "the share of its speed that ", which,
                                     " keeps must be more than 0 and at most 1, not ", std::to_string(share));
}

/// A backward and the communication of its gradients, in seconds.
struct ContendedBackward {
    double finish = 0;   ///< the end of both, from the beginning of the backward
    double hidden = 0;   ///< how long both were at work; makes the backward (1 - compute) * hidden longer
    double exposed = 0;  ///< from the end of the backward to `finish`
};

/// Schedules buckets as `schedule` above does, for a backward of `backward` seconds that shares its cores with the
/// link. `ready` of each bucket is in seconds of an undisturbed backward, at most `backward`. Fills in `start` and
/// `end`, which include the delay of the backward.
inline ContendedBackward schedule(std::span<BucketTime> buckets, CallCost cost, double backward,
                                  Contention contention) {
    check(contention);
    ContendedBackward result;
    double now = 0, computed = 0;  // `computed` counts seconds of an undisturbed backward
    for (BucketTime& b : buckets) {
        if (computed < b.ready) {
            now += b.ready - computed;
            computed = b.ready;
        }
        b.start = now;
        double work = cost.seconds(static_cast<double>(b.bytes));
        if (computed < backward) {
            const double rest = (backward - computed) / contention.compute;
            const bool through = work / contention.link <= rest;
            const double both = through ? work / contention.link : rest;
            now += both;
            result.hidden += both;
            computed = through ? computed + both * contention.compute : backward;
            work = through ? 0 : work - both * contention.link;
        }
        b.end = now += work;
        result.exposed += work;
    }
    result.finish = now + (computed < backward ? backward - computed : 0);
    return result;
}

/// The times at which gradients would become ready without communication. `gradients`, in order of readiness, were
/// measured during the collectives of buckets of consecutive gradients (`ends`: see partition.hpp).
inline std::vector<ReadyGradient> undisturbed(std::span<const ReadyGradient> gradients,
                                              std::span<const std::size_t> ends, CallCost cost, Contention contention) {
    check(contention);
    std::vector<ReadyGradient> result(gradients.begin(), gradients.end());
    std::vector<BucketTime> buckets = buckets_of(gradients, ends);
    // The cost of a call during the backward; these times do not reach beyond it.
    schedule(buckets, {cost.fixed / contention.link, cost.per_byte / contention.link});
    std::size_t next = 0;
    double busy = 0;  // before bucket `next`
    for (ReadyGradient& gradient : result) {
        while (next < buckets.size() && buckets[next].end <= gradient.ready) {
            busy += buckets[next].end - buckets[next].start;
            ++next;
        }
        double until = busy;
        if (next < buckets.size() && buckets[next].start < gradient.ready)
            until += gradient.ready - buckets[next].start;
        gradient.ready -= (1 - contention.compute) * until;
    }
    return result;
}

}  // namespace gradsync::inline v0_2::plan
