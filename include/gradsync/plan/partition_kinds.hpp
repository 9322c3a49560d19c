// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <limits>
#include <vector>

#include "../core/math.hpp"
#include "backward.hpp"
#include "cost_model.hpp"
#include "partition.hpp"

/// Partitions of gradients of several kinds into buckets for one link. A bucket holds one kind.

namespace gradsync::inline v0_2::plan {

/// Gradients in order of readiness, each of one kind.
struct KindedGradients {
    std::vector<ReadyGradient> gradients;
    std::vector<std::size_t> kinds;  ///< the kind of each gradient, below `kind_count`
    std::size_t kind_count = 1;
};

/// A partition: `bucket_of[i]` is the number of gradient i's bucket. Buckets are numbered and launched in the order of their last
/// gradients; no other order finishes earlier.
struct KindedBuckets {
    std::vector<std::size_t> bucket_of;
    std::size_t count = 0;
};

namespace detail {

/// Numbers the buckets. If `closes[i]` is true, gradient i is the last of its bucket, which holds all gradients of its kind since the
/// bucket before.
inline KindedBuckets number_buckets(const KindedGradients& all, const std::vector<bool>& closes) {
    KindedBuckets result{std::vector<std::size_t>(all.gradients.size()), 0};
    std::vector<std::size_t> number(all.gradients.size());
    for (std::size_t i = 0; i < number.size(); ++i)
        if (closes[i]) number[i] = result.count++;
    std::vector<std::size_t> next(all.kind_count);
    for (std::size_t i = number.size(); i-- > 0;) {
        if (closes[i]) next[all.kinds[i]] = number[i];
        result.bucket_of[i] = next[all.kinds[i]];
    }
    return result;
}

/// The optimum over all ways to cut each kind and to interleave the buckets of all kinds:
///
///     F(i_1, ..., i_K) = min over kinds k and j < i_k of  max(F(..., j, ...), r_k(i_k)) + alpha + beta (S_k(i_k) - S_k(j))
///
/// F is the time at which the first i_k gradients of every kind k have finished. `states` is the product of all n_k + 1.
inline std::vector<bool> optimal_closes(const KindedGradients& all, CallCost cost, std::size_t states) {
    struct Kind {
        std::vector<std::size_t> places;
        std::vector<double> bytes{0.0};  // prefix sums
        std::size_t stride = 1, at = 0;
    };
    std::vector<Kind> kinds(all.kind_count);
    for (std::size_t i = 0; i < all.gradients.size(); ++i) {
        Kind& kind = kinds[all.kinds[i]];
        kind.places.push_back(i);
        kind.bytes.push_back(kind.bytes.back() + static_cast<double>(all.gradients[i].bytes));
    }
    std::size_t stride = 1;
    for (Kind& kind : kinds) {
        kind.stride = stride;
        stride *= kind.places.size() + 1;
    }
    std::vector<double> finish(states);
    std::vector<std::size_t> previous(states);  // the state before the last bucket
    for (std::size_t state = 1; state < states; ++state) {
        double best = std::numeric_limits<double>::infinity();
        for (Kind& kind : kinds) {  // the next state, in mixed radix
            if (++kind.at <= kind.places.size()) break;
            kind.at = 0;
        }
        for (const Kind& kind : kinds) {
            if (kind.at == 0) continue;
            const double ready = all.gradients[kind.places[kind.at - 1]].ready;
            for (std::size_t j = kind.at; j-- > 0;) {
                const std::size_t before = state - (kind.at - j) * kind.stride;
                const double f = gradsync::detail::larger(finish[before], ready) + cost.seconds(kind.bytes[kind.at] - kind.bytes[j]);
                if (f < best) {
                    best = f;
                    previous[state] = before;
                }
                if (finish[before] <= ready) break;  // an earlier j only makes the bucket larger
            }
        }
        finish[state] = best;
    }
    std::vector<bool> closes(all.gradients.size());
    for (std::size_t state = states - 1; state > 0; state = previous[state])
        for (const Kind& kind : kinds) {
            const std::size_t size = kind.places.size() + 1;
            const std::size_t now = state / kind.stride % size;
            if (now != previous[state] / kind.stride % size) closes[kind.places[now - 1]] = true;
        }
    return closes;
}

/// The best of the partitions that cut all kinds at the same places, with one call per kind between two cuts:
///
///     F(i) = min over j < i of  max(F(j), r_i) + alpha kinds(j, i) + beta (S_i - S_j)
///
/// kinds(j, i) takes few values, and changes with j only at the last place of each kind. A minimum for each value is enough: O(n K log n).
inline std::vector<bool> common_closes(const KindedGradients& all, CallCost cost) {
    const std::size_t n = all.gradients.size();
    const std::vector<double> bytes = prefix_bytes(all.gradients);
    std::vector<double> finish(n + 1), rest(n + 1);
    std::vector<std::size_t> previous(n + 1);
    std::vector<std::size_t> least;                 // places whose rest increases: the first at or behind j has the least rest from j on
    std::vector<std::size_t> recent;                // kinds, the most recent first
    std::vector<std::size_t> last(all.kind_count);  // 1 + the last place of each kind
    std::size_t idle = 0;
    for (std::size_t i = 1; i <= n; ++i) {
        const ReadyGradient& gradient = all.gradients[i - 1];
        const std::size_t kind = all.kinds[i - 1];
        std::size_t at = 0;
        while (at < recent.size() && recent[at] != kind) ++at;
        if (at == recent.size()) recent.push_back(kind);
        for (; at > 0; --at) recent[at] = recent[at - 1];
        recent[0] = kind;
        last[kind] = i;

        while (!least.empty() && rest[least.back()] >= rest[i - 1]) least.pop_back();
        least.push_back(i - 1);
        while (idle + 1 < i && finish[idle + 1] <= gradient.ready) ++idle;

        finish[i] = std::numeric_limits<double>::infinity();
        const auto consider = [&](std::size_t j, std::size_t calls) {
            const double f = gradsync::detail::larger(finish[j], gradient.ready) + static_cast<double>(calls) * cost.fixed +
                             cost.per_byte * (bytes[i] - bytes[j]);
            if (f < finish[i]) {
                finish[i] = f;
                previous[i] = j;
            }
        };
        for (std::size_t calls = 1; calls <= recent.size(); ++calls) {
            const std::size_t from = calls < recent.size() ? last[recent[calls]] : 0;  // from <= j <= until: `calls` calls
            const std::size_t until = last[recent[calls - 1]] - 1;
            if (from > until) continue;
            if (from <= idle) consider(gradsync::detail::smaller(idle, until), calls);
            const std::size_t busy = gradsync::detail::larger(from, idle + 1);
            std::size_t low = 0, high = least.size();
            while (low < high) {
                const std::size_t middle = (low + high) / 2;
                if (least[middle] < busy) low = middle + 1;
                else high = middle;
            }
            if (low < least.size()) consider(least[low], calls);
        }
        rest[i] = finish[i] - cost.per_byte * bytes[i];
    }
    std::vector<bool> closes(n);
    std::size_t begin = n;
    std::vector<bool> seen;
    for (std::size_t i = n; i > 0; i = begin) {
        begin = previous[i];
        seen.assign(all.kind_count, false);
        for (std::size_t place = i; place-- > begin;)
            if (!seen[all.kinds[place]]) closes[place] = seen[all.kinds[place]] = true;
    }
    return closes;
}

}  // namespace detail

/// The limit of states for the exact optimum over several kinds: enough for 2 kinds of a thousand gradients, or 3 of a hundred.
inline constexpr std::size_t exact_states = std::size_t{1} << 20;

/// The buckets that finish earliest. Exact for one kind, in O(n). Exact for several kinds if the product of (count + 1) over the kinds is
/// at most `states`. Otherwise the best of the partitions that cut all kinds at the same places.
inline KindedBuckets optimal_buckets(const KindedGradients& all, CallCost cost, std::size_t states = exact_states) {
    if (all.gradients.empty()) return {};
    std::vector<std::size_t> counts(all.kind_count);
    for (const std::size_t kind : all.kinds) ++counts[kind];
    std::size_t product = 1, used = 0;
    for (const std::size_t count : counts) {
        used += count != 0;
        product = product <= states / (count + 1) ? product * (count + 1) : states + 1;
    }
    if (used == 1) {
        std::vector<bool> closes(all.gradients.size());
        for (const std::size_t end : optimal_ends(all.gradients, cost)) closes[end - 1] = true;
        return detail::number_buckets(all, closes);
    }
    return detail::number_buckets(all, product <= states ? detail::optimal_closes(all, cost, product) : detail::common_closes(all, cost));
}

}  // namespace gradsync::inline v0_2::plan
