// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>

#include "../core/bucket_plan.hpp"

namespace gradsync::inline v0_2::detail {

/// The plan that puts order[at] into bucket `bucket_of[at]` of `buckets`. Buckets are launched in the order in which
/// they become complete, by the place of their last parameter in `order`. Linear in the number of parameters.
inline BucketPlan plan_of(std::span<const std::size_t> order, std::span<const std::size_t> bucket_of,
                          std::size_t buckets) {
    List<List<std::size_t>> members(buckets);
    for (std::size_t at = 0; at < order.size(); ++at) members[bucket_of[at]].push_back(order[at]);
    BucketPlan plan;
    for (std::size_t at = 0; at < order.size(); ++at)
        if (const auto& bucket = members[bucket_of[at]]; bucket.back() == order[at]) plan.push_back(bucket);
    return plan;
}

/// The loop that bucket policies share. It takes the parameters in `order` and keeps one open bucket for each kind
/// (dtype, memory space). A parameter joins the open bucket if the total stays within the bucket's cap. Otherwise, or
/// if it is the first of its kind, it opens the next bucket. The k-th bucket of a kind may hold `caps[k]` bytes; the
/// last cap repeats. With `spares_copies`, a parameter that is `cheaper_alone` gets a bucket of its own, which uses no
/// cap and closes no bucket.
inline BucketPlan assign_buckets(std::span<const ParameterInfo> parameters, std::span<const std::size_t> order,
                                 std::span<const std::size_t> caps, bool spares_copies) {
    struct Sequence {  // the buckets of one kind
        std::size_t opened = 0;
        std::size_t open = 0;  ///< number of the open bucket, if opened > 0
        std::size_t bytes = 0;
    };
    std::array<Sequence, ParameterInfo::kind_count> sequences{};
    List<std::size_t> bucket_of(order.size());  // by place in `order`
    std::size_t buckets = 0;

    for (std::size_t at = 0; at < order.size(); ++at) {
        const ParameterInfo& parameter = parameters[order[at]];
        if (spares_copies && parameter.cheaper_alone) {
            bucket_of[at] = buckets++;
            continue;
        }
        Sequence& sequence = sequences[parameter.kind()];
        const auto joins = [&] {
            if (sequence.opened == 0) return false;
            const std::size_t cap = sequence.opened < caps.size() ? caps[sequence.opened - 1] : caps.back();
            return sequence.bytes <= cap && parameter.bytes() <= cap - sequence.bytes;
        };
        if (!joins()) sequence = {sequence.opened + 1, buckets++, 0};
        sequence.bytes += parameter.bytes();
        bucket_of[at] = sequence.open;
    }

    return plan_of(order, bucket_of, buckets);
}

}  // namespace gradsync::inline v0_2::detail
