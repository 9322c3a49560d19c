// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/bucket_plan.hpp"
#include "../core/parameter.hpp"
#include "../core/shard_range.hpp"

namespace gradsync::inline v0_2::detail {

/// The number of elements from the start of `range` to the start of `part`, which lies in it; 0 if `part` is empty.
inline std::size_t distance(const BufferView& range, const BufferView& part) noexcept {
    if (part.count == 0) return 0;
    return static_cast<std::size_t>(static_cast<std::byte*>(part.data) - static_cast<std::byte*>(range.data)) /
           size_of(range.dtype);
}

/// The position of each parameter in its bucket, in elements. Positions are aligned to 64 bytes,
/// unless the bucket is a range of the trainer's memory. Gaps between parameters belong to no parameter.
/// A bucket ends with its last parameter, unless its parameters have owners: it then has slots of one size, one for
/// each rank, so that each parameter lies in its owner's shard.
struct BucketLayout {
    List<std::size_t> offsets;  ///< by parameter: offset of its first element in the bucket
    List<std::size_t> counts;   ///< by bucket: number of elements

    BucketLayout() = default;
    /// `owners`: see WholeOwners; empty if there are none. The owners of a bucket ascend.
    BucketLayout(const BucketPlan& plan, ListView<const ParameterInfo> infos, ListView<const int> owners = {},
                 int size = 1)
        : offsets(infos.size()), counts(plan.size()) {
        for (std::size_t b = 0; b < plan.size(); ++b) {
            const bool whole = infos[plan.bucket(b).front()].whole;
            std::size_t next = 0, slot = 0;
            int owner = 0;
            for (std::size_t i : plan.bucket(b)) {
                if (whole && owners[i] != std::exchange(owner, owners[i])) next = 0;
                offsets[i] = next;
                counts[b] = next + infos[i].count;
                next += in_lines_of(infos[i]);
                slot = larger(slot, next);
            }
            if (!whole) continue;
            counts[b] = slot * static_cast<std::size_t>(size);
            for (std::size_t i : plan.bucket(b)) offsets[i] += slot * static_cast<std::size_t>(owners[i]);
        }
    }

    /// The elements of a parameter and of the gap behind it.
    static constexpr std::size_t in_lines_of(const ParameterInfo& info) noexcept {
        return round_up(info.count, line_bytes / size_of(info.dtype));
    }
};

/// A part of one parameter that lies in a rank's shard of a bucket.
struct ShardSlice {
    std::size_t bucket = 0;
    std::size_t parameter = 0;
    std::size_t first = 0;   ///< index of its first element in the parameter
    std::size_t count = 0;   ///< never 0
    std::size_t offset = 0;  ///< its offset in the shard, in elements
};

/// The slices that `rank` owns if buckets are split over `size` ranks, bucket by bucket.
inline List<ShardSlice> shard_slices(const BucketPlan& plan, const BucketLayout& layout,
                                     ListView<const ParameterInfo> infos, int size, int rank) {
    List<ShardSlice> slices;
    for (std::size_t b = 0; b < plan.size(); ++b) {
        const ElementRange shard = shard_range(layout.counts[b], size, rank);
        for (std::size_t i : plan.bucket(b)) {
            const std::size_t begin = layout.offsets[i], end = begin + infos[i].count;
            const std::size_t from = larger(begin, shard.first), to = smaller(end, shard.last);
            if (from < to) slices.push_back({b, i, from - begin, to - from, from - shard.first});
        }
    }
    return slices;
}

/// The slots of buckets that have memory only while they need it.
struct SlotNeeds {
    std::size_t slots = 0;          ///< their number
    List<std::uint8_t> stays_open;  ///< by bucket: are others opened before it is full?
};

/// The number of buckets that are filled at the same time, plus one in flight, if the trainer asks for gradients in
/// `order`. A gradient with several uses is asked for at its first use. A bucket that is `unused` is launched only at
/// the end of a step, as are all later ones.
[[gnu::cold]] inline SlotNeeds slots_needed(const BucketPlan& plan, ListView<const ParameterView> parameters,
                                            std::span<const std::size_t> order, bool unused) {
    SlotNeeds needs{plan.size(), List<std::uint8_t>(plan.size())};
    if (unused) return needs;
    List<std::size_t> bucket_of(parameters.size()), missing(plan.size());
    std::size_t open = 0, most = 0, early = 0;
    for (std::size_t b = 0; b < plan.size(); ++b) {
        bool reused = false;
        for (std::size_t i : plan.bucket(b)) {
            bucket_of[i] = b;
            reused = reused || parameters[i].uses > 1;
        }
        missing[b] = plan.bucket(b).size();
        early += reused ? 1 : 0;
        needs.stays_open[b] = reused ? 1 : 0;
    }
    for (std::size_t i : order) {
        std::size_t& left = missing[bucket_of[i]];
        if (left == plan.bucket(bucket_of[i]).size()) {
            most = larger(most, ++open);
            for (std::size_t b = 0; open > 1 && b < plan.size(); ++b)
                if (b != bucket_of[i] && missing[b] != 0 && missing[b] != plan.bucket(b).size())
                    needs.stays_open[b] = 1;
        }
        if (--left == 0) --open;
    }
    needs.slots = smaller(most + early + 1, plan.size());
    return needs;
}

}  // namespace gradsync::inline v0_2::detail
