// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "../core/bucket_plan.hpp"

namespace gradsync::inline v0_2::detail {

/// The loop that bucket policies share. It takes the parameters in `order` and keeps one open bucket for each kind (dtype, memory space). A
/// parameter joins the open bucket if the total stays within the bucket's cap. Otherwise, or if it is the first of its kind, it opens the
/// next bucket. The k-th bucket of a kind may hold `caps[k]` bytes; the last cap repeats. If `apart(info)` is true, the parameter gets a
/// bucket of its own, which uses up no cap and closes no bucket.
///
/// Buckets are launched in the order in which they become complete, by the place of their last parameter in `order`. Linear in the number
/// of parameters.
template <class Apart>
BucketPlan assign_buckets(std::span<const ParameterInfo> parameters, std::span<const std::size_t> order, std::span<const std::size_t> caps,
                          Apart apart) {
    struct Sequence {  // the buckets of one kind
        std::size_t opened = 0;
        std::size_t open = 0;  ///< number of the open bucket, if opened > 0
        std::size_t bytes = 0;
    };
    std::array<Sequence, ParameterInfo::kind_count> sequences{};
    std::vector<std::size_t> bucket_of(order.size());  // by place in `order`
    std::vector<std::size_t> last;                     // by bucket: the place in `order` of its last parameter,
    std::vector<std::size_t> count;                    // and how many it has

    for (std::size_t at = 0; at < order.size(); ++at) {
        const ParameterInfo& parameter = parameters[order[at]];
        if (apart(parameter)) {
            bucket_of[at] = last.size();
            last.push_back(at);
            count.push_back(1);
            continue;
        }
        Sequence& sequence = sequences[parameter.kind()];
        const auto joins = [&] {
            if (sequence.opened == 0) return false;
            const std::size_t cap = sequence.opened < caps.size() ? caps[sequence.opened - 1] : caps.back();
            return sequence.bytes <= cap && parameter.bytes() <= cap - sequence.bytes;
        };
        if (!joins()) {
            sequence = {sequence.opened + 1, last.size(), 0};
            last.push_back(at);
            count.push_back(0);
        }
        sequence.bytes += parameter.bytes();
        bucket_of[at] = sequence.open;
        last[sequence.open] = at;
        ++count[sequence.open];
    }

    std::vector<std::size_t> next(last.size());  // by bucket: the place in `grouped` of its next parameter
    std::size_t placed = 0;
    for (std::size_t at = 0; at < order.size(); ++at) {
        const std::size_t b = bucket_of[at];
        if (last[b] != at) continue;
        next[b] = placed;
        placed += count[b];
    }
    std::vector<std::size_t> grouped(order.size());
    for (std::size_t at = 0; at < order.size(); ++at) grouped[next[bucket_of[at]]++] = order[at];

    BucketPlan plan;
    for (std::size_t at = 0; at < order.size(); ++at)
        if (const std::size_t b = bucket_of[at]; last[b] == at) plan.push_back({grouped.data() + next[b] - count[b], count[b]});
    return plan;
}

}  // namespace gradsync::inline v0_2::detail
