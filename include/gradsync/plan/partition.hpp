// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "../core/math.hpp"
#include "backward.hpp"
#include "cost_model.hpp"

/// Partitions of gradients of one kind into buckets: the optimum, and two rules that others use. Gradients are in order of readiness; times
/// do not decrease and are not negative. A result lists the ends of the buckets: `ends[b]` is the first gradient behind bucket b.

namespace gradsync::inline v0_2::plan {

namespace detail {

inline std::vector<double> prefix_bytes(std::span<const ReadyGradient> gradients) {
    std::vector<double> sums(gradients.size() + 1);
    for (std::size_t i = 0; i < gradients.size(); ++i) sums[i + 1] = sums[i] + static_cast<double>(gradients[i].bytes);
    return sums;
}

/// `previous[i]` is the beginning of the last bucket in the best plan for the first i gradients.
inline std::vector<std::size_t> ends_of(std::span<const std::size_t> previous) {
    std::vector<std::size_t> ends;
    for (std::size_t i = previous.size() - 1; i > 0; i = previous[i]) ends.push_back(i);
    for (std::size_t a = 0, b = ends.size(); a + 1 < b; ++a) std::swap(ends[a], ends[--b]);
    return ends;
}

}  // namespace detail

/// The buckets that finish earliest, in O(n). F(n) is the earliest finish:
///
///     F(0) = 0;  F(i) = min over j < i of  max(F(j), r_i) + alpha + beta (S_i - S_j)
///
/// r are the times of readiness, S the prefix sums of bytes, alpha and beta the cost of a call.
///
/// F does not decrease, and neither does p(i) = max{j < i : F(j) <= r_i}. For j up to p(i) the link is idle when gradient
/// i is ready; fewer remaining bytes are better, so that only j = p(i) counts. For larger j the link is busy. Only the least
/// F(j) - beta S_j counts, in a window whose ends only advance.
inline std::vector<std::size_t> optimal_ends(std::span<const ReadyGradient> gradients, CallCost cost) {
    const std::size_t n = gradients.size();
    const std::vector<double> bytes = detail::prefix_bytes(gradients);
    std::vector<double> finish(n + 1), rest(n + 1);  // rest[j] = F(j) - beta S_j
    std::vector<std::size_t> previous(n + 1);
    std::vector<std::size_t> window(n + 1);  // places j whose rest[j] increases; the first is the least
    std::size_t first = 0, last = 0, idle = 0;
    for (std::size_t i = 1; i <= n; ++i) {
        const double ready = gradients[i - 1].ready;
        while (first < last && rest[window[last - 1]] >= rest[i - 1]) --last;
        window[last++] = i - 1;
        while (idle + 1 < i && finish[idle + 1] <= ready) ++idle;
        while (first < last && window[first] <= idle) ++first;
        previous[i] = idle;
        finish[i] = gradsync::detail::larger(finish[idle], ready) + cost.seconds(bytes[i] - bytes[idle]);
        if (first < last) {
            const std::size_t j = window[first];
            const double f = gradsync::detail::larger(finish[j], ready) + cost.seconds(bytes[i] - bytes[j]);
            if (f < finish[i]) {
                finish[i] = f;
                previous[i] = j;
            }
        }
        rest[i] = finish[i] - cost.per_byte * bytes[i];
    }
    return detail::ends_of(previous);
}

/// The rule of MG-WFBP (arXiv 1811.11141): a gradient that becomes ready at r joins the bucket before it iff
/// r < tau + t  and  (r < tau or r - tau < alpha).  That bucket would start at tau and take t.
inline std::vector<std::size_t> merged_ends(std::span<const ReadyGradient> gradients, CallCost cost) {
    std::vector<std::size_t> ends;
    double free = 0;  // the time at which the buckets before the pending one have finished
    BucketTime pending;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
        const ReadyGradient& gradient = gradients[i];
        if (i > 0) {
            const double tau = gradsync::detail::larger(free, pending.ready);
            const double t = cost.seconds(static_cast<double>(pending.bytes));
            const bool merge = gradient.ready < tau + t && (gradient.ready < tau || gradient.ready - tau < cost.fixed);
            if (!merge) {
                ends.push_back(i);
                free = tau + t;
                pending = {};
            }
        }
        pending.ready = gradient.ready;
        pending.bytes += gradient.bytes;
    }
    if (!gradients.empty()) ends.push_back(gradients.size());
    return ends;
}

/// The best size of equal buckets if a bucket's communication takes about as long as its computation. k buckets leave exposed the transfer
/// of one bucket and the overhead of all calls: s / (w k) + k o, for s bytes, bandwidth w and overhead o. The minimum is at
/// k = sqrt(s / (w o)), with buckets of sqrt(s w o) bytes.
inline double square_root_bucket_bytes(double bytes, CallCost cost) noexcept {
    return gradsync::detail::square_root(bytes * cost.fixed / cost.per_byte);
}

}  // namespace gradsync::inline v0_2::plan
