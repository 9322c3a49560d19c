#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "../core/bucket_plan.hpp"

namespace gradsync::inline v0::detail {

/// The loop that bucket policies share: takes the parameters in `order`, keeps one open bucket for each (dtype,
/// memory space), and asks of every parameter but a bucket's first whether it may join:
/// `joins(k, bytes, more)`, the open bucket being number k of its (dtype, space), holding `bytes` so far, and the
/// parameter having `more`. Where it may not, that bucket closes, and the parameter opens the next one.
///
/// Buckets are launched in the order in which they become complete: by the place in `order` of their last
/// parameter. Linear in the number of parameters.
template <class Joins>
BucketPlan assign_buckets(std::span<const ParameterInfo> parameters, std::span<const std::size_t> order, Joins joins) {
    struct Bucket {
        std::size_t last = 0;   ///< place in `order` of its last parameter
        std::size_t count = 0;  ///< parameters
        std::size_t next = 0;   ///< where its next parameter goes in `grouped`
    };
    struct Sequence {  // the buckets of one (dtype, space)
        std::size_t opened = 0;
        std::size_t open = 0;  ///< index of the open bucket, where opened > 0
        std::size_t bytes = 0;
    };
    constexpr std::size_t spaces = 2;
    std::array<Sequence, dtype_count * spaces> sequences{};
    std::vector<Bucket> buckets;
    std::vector<std::size_t> bucket_of(order.size());

    for (std::size_t at = 0; at < order.size(); ++at) {
        const ParameterInfo& parameter = parameters[order[at]];
        Sequence& sequence =
            sequences[static_cast<std::size_t>(parameter.dtype) * spaces + static_cast<std::size_t>(parameter.space)];
        if (sequence.opened == 0 || !joins(sequence.opened - 1, sequence.bytes, parameter.bytes())) {
            sequence = {sequence.opened + 1, buckets.size(), 0};
            buckets.emplace_back();
        }
        sequence.bytes += parameter.bytes();
        bucket_of[at] = sequence.open;
        buckets[sequence.open].last = at;
        ++buckets[sequence.open].count;
    }

    std::vector<std::size_t> launches;  // indices into `buckets`
    launches.reserve(buckets.size());
    std::size_t placed = 0;
    for (std::size_t at = 0; at < order.size(); ++at) {
        Bucket& bucket = buckets[bucket_of[at]];
        if (bucket.last != at) continue;
        launches.push_back(bucket_of[at]);
        bucket.next = placed;
        placed += bucket.count;
    }

    std::vector<std::size_t> grouped(order.size());
    for (std::size_t at = 0; at < order.size(); ++at) grouped[buckets[bucket_of[at]].next++] = order[at];

    BucketPlan plan;
    for (std::size_t b : launches)
        plan.push_back(std::span(grouped).subspan(buckets[b].next - buckets[b].count, buckets[b].count));
    return plan;
}

}  // namespace gradsync::inline v0::detail
