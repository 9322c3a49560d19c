// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "bucket_layout.hpp"

namespace gradsync::inline v0_2::detail {

/// The costs of whole parameters; see WholeParameters.
struct WholeCosts {
    List<double> costs;          ///< by parameter: 0 if shards may cut it; empty if they may cut all
    bool joins_buckets = false;  ///< may buckets become larger, so that less of them is padding?
};

/// Gives each whole parameter an owner, the same on all ranks. In each bucket the largest parameter comes first
/// (Graham, "Bounds on multiprocessing timing anomalies", 1969). Of the ranks whose slot has room for it, it goes to
/// the one with the least cost so far; if none has room, to the rank that has the fewest elements of the bucket, and
/// of these to the one with the least cost.
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
        List<List<std::size_t>> buckets, open;  // open: one of each kind, or none
        const auto kind = [&](ListView<const std::size_t> bucket) { return infos[bucket[0]].kind(); };
        const auto is_full = [&](ListView<const std::size_t> bucket) {
            List<double> spent(static_cast<std::size_t>(size), 0);
            const std::size_t padded = deal(bucket, infos, spent);
            std::size_t elements = 0;
            for (const std::size_t i : bucket) elements += BucketLayout::in_lines_of(infos[i]);
            return padded - elements <= elements / 10;
        };
        for (std::size_t b = 0; b < plan.size(); ++b) {
            List<std::size_t> bucket(plan.bucket(b));
            const bool joins = whole_.joins_buckets && infos[bucket.front()].whole;
            for (List<std::size_t>& other : open)
                if (kind(other) == kind(bucket)) bucket = joined(std::move(other), bucket);
            open.erase_if([](const List<std::size_t>& other) { return other.empty(); });
            (joins && !is_full(bucket) ? open : buckets).push_back(std::move(bucket));
        }
        // What is left is joined with buckets before it, which leaves those empty.
        for (List<std::size_t>& left : open) {
            for (std::size_t b = buckets.size(); b-- > 0 && !is_full(left);)
                if (!buckets[b].empty() && kind(buckets[b]) == kind(left)) left = joined(std::move(buckets[b]), left);
            buckets.push_back(std::move(left));
        }

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
    static List<std::size_t> joined(List<std::size_t> first, ListView<const std::size_t> second) {
        for (const std::size_t i : second) first.push_back(i);
        return first;
    }

    /// Deals one bucket. Adds the costs to `spent`, and returns the elements of the padded bucket.
    std::size_t deal(ListView<const std::size_t> bucket, ListView<const ParameterInfo> infos, List<double>& spent) {
        const auto elements = [&](std::size_t i) { return BucketLayout::in_lines_of(infos[i]); };
        List<std::size_t> largest_first(bucket), filled(spent.size(), 0);
        sort_by(largest_first, [&](std::size_t i, std::size_t j) {
            return infos[i].count != infos[j].count ? infos[i].count > infos[j].count : i < j;
        });
        std::size_t all = 0, slot = 0;
        for (const std::size_t i : bucket) all += elements(i);
        const std::size_t room = larger(divide_up(all, spent.size()), elements(largest_first.front()));
        for (const std::size_t i : largest_first) {
            const auto before = [&](std::size_t r, std::size_t other) {
                const bool fits = filled[r] + elements(i) <= room, other_fits = filled[other] + elements(i) <= room;
                if (fits != other_fits) return fits;
                if (fits && spent[r] != spent[other]) return spent[r] < spent[other];
                return filled[r] != filled[other] ? filled[r] < filled[other] : spent[r] < spent[other];
            };
            std::size_t best = 0;
            for (std::size_t r = 1; r < filled.size(); ++r)
                if (before(r, best)) best = r;
            owners_[i] = static_cast<int>(best);
            spent[best] += whole_.costs[i];
            slot = larger(slot, filled[best] += elements(i));
        }
        return slot * filled.size();
    }

    WholeCosts whole_;
    List<int> owners_;
};

}  // namespace gradsync::inline v0_2::detail
