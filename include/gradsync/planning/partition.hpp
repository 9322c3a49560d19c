// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "backward.hpp"

/// @file
/// Partitions of gradients into buckets for one link: the optimum, and two rules that others use. Gradients are in
/// order of readiness; times do not decrease and are not negative. A bucket holds gradients of one kind. If all are of
/// one kind, a result lists the ends of the buckets: `ends[b]` is the first gradient after bucket b.

namespace gradsync::inline v0_2::plan {

/// Gradients in order of readiness, each of one kind.
struct KindedGradients {
    std::vector<ReadyGradient> gradients;  ///< in the order in which they become ready
    std::vector<std::size_t> kinds;        ///< the kind of each gradient, below `kind_count`
    std::size_t kind_count = 1;            ///< the number of kinds
};

/// A partition: `bucket_of[i]` is the number of gradient i's bucket. Buckets are numbered and launched in the order of
/// their last gradients; no other order finishes earlier.
struct KindedBuckets {
    std::vector<std::size_t> bucket_of;  ///< by gradient
    std::size_t count = 0;               ///< the number of buckets
};

namespace detail {

/// Numbers the buckets. If `closes[i]` is true, gradient i is the last of its bucket, which holds all gradients of its
/// kind since the bucket before.
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
///     F(i_1, ..., i_K) = min over kinds k and j < i_k of
///                        max(F(..., j, ...), r_k(i_k)) + alpha + beta (S_k(i_k) - S_k(j))
///
/// F is the time at which the first i_k gradients of every kind k have finished.
/// `states` is the product of all n_k + 1.
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
                const double f =
                    gradsync::detail::larger(finish[before], ready) + cost.seconds(kind.bytes[kind.at] - kind.bytes[j]);
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

/// The places j at which the link is busy when the next gradient is ready, without those that have a later place with
/// no more rest F(j) - beta S_j.
struct BusyPlaces {
    struct Place {
        std::size_t place;
        double rest;
    };
    std::vector<Place> places = {};  // their rest increases
    std::size_t first = 0;           // the first that is not dropped

    void add(std::size_t place, double rest) {
        while (places.size() > first && places.back().rest >= rest) places.pop_back();
        places.push_back({place, rest});
    }
    void drop_until(std::size_t idle) {
        while (first < places.size() && places[first].place <= idle) ++first;
    }
    /// Calls `use` with the place of the least rest from `from` on, if there is one.
    template <class Use>
    void use_least(std::size_t from, Use&& use) const {
        std::size_t low = first, high = places.size();
        if (low < high && places[low].place >= from) high = low;
        while (low < high) {
            const std::size_t middle = (low + high) / 2;
            if (places[middle].place < from) low = middle + 1;
            else high = middle;
        }
        if (low < places.size()) use(places[low].place);
    }
};

/// The last gradients of the buckets if all kinds are cut at the same places. `previous[i]`: the cut before cut i.
inline std::vector<bool> closes_of_cuts(const KindedGradients& all, const std::vector<std::size_t>& previous) {
    std::vector<bool> closes(all.gradients.size()), seen;
    for (std::size_t begin, end = closes.size(); end > 0; end = begin) {
        begin = previous[end];
        seen.assign(all.kind_count, false);
        for (std::size_t place = end; place-- > begin;)
            if (!seen[all.kinds[place]]) closes[place] = seen[all.kinds[place]] = true;
    }
    return closes;
}

/// The best of the partitions that cut all kinds at the same places, with one call per kind between two cuts:
///
///     F(i) = min over j < i of  max(F(j), r_i) + alpha kinds(j, i) + beta (S_i - S_j)
///
/// kinds(j, i) takes few values, and changes with j only at the last place of each kind. A minimum for each value is
/// enough: O(n K log n), and O(n) if all are of one kind (see `optimal_ends`).
inline std::vector<bool> common_closes(const KindedGradients& all, CallCost cost) {
    const std::size_t n = all.gradients.size();
    std::vector<double> bytes(n + 1);  // prefix sums
    bool one_kind = true;
    for (std::size_t i = 0; i < n; ++i) {
        bytes[i + 1] = bytes[i] + static_cast<double>(all.gradients[i].bytes);
        one_kind = one_kind && all.kinds[i] == all.kinds[0];
    }
    std::vector<double> finish(n + 1);
    std::vector<std::size_t> previous(n + 1);
    std::vector<std::size_t> ends(all.kind_count);  // behind the last gradient of each kind
    std::vector<std::size_t> latest;                // the same, in descending order
    std::size_t idle = 0;                           // the last place at which the link is idle
    BusyPlaces busy;
    busy.add(0, 0);
    for (std::size_t i = 1; i <= n; ++i) {
        const double ready = all.gradients[i - 1].ready;
        ends[all.kinds[i - 1]] = i;
        latest = ends;
        gradsync::detail::sort_by(latest, [](std::size_t a, std::size_t b) { return a > b; });
        while (idle + 1 < i && finish[idle + 1] <= ready) ++idle;
        busy.drop_until(idle);
        finish[i] = std::numeric_limits<double>::infinity();
        for (std::size_t calls = 1; calls <= latest.size() && latest[calls - 1] != 0; ++calls) {
            const auto consider = [&](std::size_t j) {
                const double start = gradsync::detail::larger(finish[j], ready), more = bytes[i] - bytes[j];
                // For one kind it is what `schedule` computes, to the bit.
                const double f = one_kind ? start + cost.seconds(more)
                                          : start + static_cast<double>(calls) * cost.fixed + cost.per_byte * more;
                if (f < finish[i]) {
                    finish[i] = f;
                    previous[i] = j;
                }
            };
            // The gradients from place j on are of `calls` kinds if from <= j <= until.
            const std::size_t from = calls < latest.size() ? latest[calls] : 0, until = latest[calls - 1] - 1;
            if (from > until) continue;
            if (from <= idle) consider(gradsync::detail::smaller(idle, until));
            busy.use_least(from, consider);
        }
        busy.add(i, finish[i] - cost.per_byte * bytes[i]);
    }
    return closes_of_cuts(all, previous);
}

}  // namespace detail

/// The buckets that finish earliest, in O(n). F(n) is the earliest finish:
///
///     F(0) = 0;  F(i) = min over j < i of  max(F(j), r_i) + alpha + beta (S_i - S_j)
///
/// r are the times of readiness, S the prefix sums of bytes, alpha and beta the cost of a call.
///
/// F does not decrease, and neither does p(i) = max{j < i : F(j) <= r_i}. For j up to p(i) the link is idle when
/// gradient i is ready; fewer remaining bytes are better, so that only j = p(i) counts. For larger j the link is busy.
/// Only the least F(j) - beta S_j counts, in a window whose ends only advance.
inline std::vector<std::size_t> optimal_ends(std::span<const ReadyGradient> gradients, CallCost cost) {
    const KindedGradients one_kind{{gradients.begin(), gradients.end()}, std::vector<std::size_t>(gradients.size())};
    const std::vector<bool> closes = detail::common_closes(one_kind, cost);
    std::vector<std::size_t> ends;
    for (std::size_t i = 0; i < closes.size(); ++i)
        if (closes[i]) ends.push_back(i + 1);
    return ends;
}

/// The limit of states for the exact optimum over several kinds: enough for 2 kinds of a thousand
/// gradients, or 3 of a hundred.
inline constexpr std::size_t exact_states = std::size_t{1} << 20;

/// The buckets that finish earliest. Exact for one kind, in O(n). Exact for several kinds if the product of (count + 1)
/// over the kinds is at most `states`. Otherwise the best of the partitions that cut all kinds at the same places.
inline KindedBuckets optimal_buckets(const KindedGradients& all, CallCost cost, std::size_t states = exact_states) {
    if (all.gradients.empty()) return {};
    std::vector<std::size_t> counts(all.kind_count);
    for (const std::size_t kind : all.kinds) ++counts[kind];
    std::size_t product = 1, used = 0;
    for (const std::size_t count : counts) {
        used += count != 0;
        product = product <= states / (count + 1) ? product * (count + 1) : states + 1;
    }
    const bool by_kind = used > 1 && product <= states;
    return detail::number_buckets(
        all, by_kind ? detail::optimal_closes(all, cost, product) : detail::common_closes(all, cost));
}

/// The rule of MG-WFBP (arXiv 1811.11141): a gradient that becomes ready at r joins the bucket before it iff
///
///     r < tau + t  and  (r < tau  or  r - tau < alpha)
///
/// That bucket would start at tau and take t.
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

/// The best size of equal buckets if a bucket's communication takes about as long as its computation. k buckets leave
/// exposed the transfer of one bucket and the overhead of all calls: s / (w k) + k o, for s bytes, bandwidth w and
/// overhead o. The minimum is at k = sqrt(s / (w o)), with buckets of sqrt(s w o) bytes.
inline double square_root_bucket_bytes(double bytes, CallCost cost) noexcept {
    return gradsync::detail::square_root(bytes * cost.fixed / cost.per_byte);
}

}  // namespace gradsync::inline v0_2::plan
