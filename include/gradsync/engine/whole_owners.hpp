// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "bucket_layout.hpp"

namespace gradsync::inline v0_2::detail {

/// What a parameter costs its owner; see WholeParameters.
struct WholeCosts {
    List<double> costs;          ///< by parameter: 0 if shards may cut it; empty if they may cut all
    bool joins_buckets = false;  ///< may buckets become larger, so that less of them is padding?
};

/// Gives each whole parameter an owner, the same on all ranks. In each bucket the largest parameter comes first, and
/// goes to the rank that has the fewest elements of the bucket (Graham, "Bounds on multiprocessing timing anomalies",
/// 1969). Ranks that have equally many are told apart by the cost of all that they own so far.
class WholeOwners {
public:
    explicit WholeOwners(const WholeCosts& whole) : whole_(whole), owners_(whole.costs.size(), 0) {}

    bool empty() const noexcept { return owners_.empty(); }
    double cost(std::size_t i) const noexcept { return empty() ? 0 : whole_.costs[i]; }
    bool is_whole(std::size_t i) const noexcept { return cost(i) != 0; }
    ListView<const int> owners() const noexcept { return owners_; }  ///< by parameter; of whole ones

    /// Deals the plan's whole parameters to `size` ranks. Returns the plan with the owners of each bucket in ascending
    /// order. If buckets may become larger, a bucket of whole parameters is joined with the next ones until at most a
    /// tenth is added as padding.
    [[gnu::cold]] BucketPlan deal(const BucketPlan& plan, ListView<const ParameterInfo> infos, int size) {
        List<List<std::size_t>> buckets;
        List<std::size_t> open;
        const auto is_full = [&] {
            List<double> spent(static_cast<std::size_t>(size), 0);
            const std::size_t padded = deal(open, infos, spent);
            std::size_t elements = 0;
            for (const std::size_t i : open) elements += BucketLayout::in_lines_of(infos[i]);
            return padded - elements <= elements / 10;
        };
        for (std::size_t b = 0; b < plan.size(); ++b) {
            const std::span<const std::size_t> bucket = plan.bucket(b);
            const bool joins = whole_.joins_buckets && infos[bucket.front()].whole;
            if (joins && !open.empty() && infos[open.front()].kind() != infos[bucket.front()].kind())
                buckets.push_back(std::exchange(open, {}));
            List<std::size_t>& to = joins ? open : (buckets.push_back({}), buckets.back());
            for (const std::size_t i : bucket) to.push_back(i);
            if (joins && is_full()) buckets.push_back(std::exchange(open, {}));
        }
        // What is left is joined with whole buckets before it, which leaves those empty.
        for (std::size_t b = buckets.size(); !open.empty() && b-- > 0 && !is_full();)
            if (infos[buckets[b].front()].kind() == infos[open.front()].kind()) {
                for (const std::size_t i : open) buckets[b].push_back(i);
                open = std::exchange(buckets[b], {});
            }
        buckets.push_back(std::move(open));

        List<double> spent(static_cast<std::size_t>(size), 0);
        BucketPlan dealt;
        for (List<std::size_t>& bucket : buckets) {
            if (bucket.empty()) continue;
            if (infos[bucket.front()].whole) {
                deal(bucket, infos, spent);
                sort_by(bucket, [&](std::size_t i, std::size_t j) { return owners_[i] < owners_[j]; });
            }
            dealt.push_back(bucket);
        }
        return dealt;
    }

private:
    /// Deals one bucket. Adds the costs to `spent`, and returns the elements of the padded bucket.
    std::size_t deal(ListView<const std::size_t> bucket, ListView<const ParameterInfo> infos, List<double>& spent) {
        List<std::size_t> largest_first, filled(spent.size(), 0);
        for (const std::size_t i : bucket) largest_first.push_back(i);
        sort_by(largest_first, [&](std::size_t i, std::size_t j) {
            return infos[i].count != infos[j].count ? infos[i].count > infos[j].count : i < j;
        });
        std::size_t slot = 0;
        for (const std::size_t i : largest_first) {
            std::size_t best = 0;
            for (std::size_t r = 1; r < filled.size(); ++r)
                if (filled[r] < filled[best] || (filled[r] == filled[best] && spent[r] < spent[best])) best = r;
            owners_[i] = static_cast<int>(best);
            spent[best] += whole_.costs[i];
            slot = larger(slot, filled[best] += BucketLayout::in_lines_of(infos[i]));
        }
        return slot * filled.size();
    }

    WholeCosts whole_;
    List<int> owners_;
};

}  // namespace gradsync::inline v0_2::detail
