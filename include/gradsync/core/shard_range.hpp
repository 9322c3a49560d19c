// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "buffer_view.hpp"
#include "list.hpp"
#include "math.hpp"

namespace gradsync::inline v0_2 {

/// A range of elements, [first, last).
struct ElementRange {
    std::size_t first = 0;  ///< index of the first element
    std::size_t last = 0;   ///< index behind the last

    constexpr std::size_t size() const noexcept { return last - first; }  ///< Returns the number of elements.
    friend constexpr bool operator==(ElementRange, ElementRange) = default;
};

/// The part of `count` elements that belongs to `rank`. Each rank gets `ceil(count / size)` elements, in rank order;
/// only the last shards are shorter or empty (the rule of `torch.chunk`). Every collective that splits a buffer over
/// the ranks uses this rule.
constexpr ElementRange shard_range(std::size_t count, int size, int rank) noexcept {
    const std::size_t each = detail::divide_up(count, static_cast<std::size_t>(size)),
                      first = each * static_cast<std::size_t>(rank);
    return {detail::smaller(first, count), detail::smaller(first + each, count)};
}

/// A rank's callback in the collective `reduce_step`, which uses the sums of its shard at once. See
/// BackendAbilities::steps_inside.
class ShardStep {
public:
    /// `range`: elements of the whole buffer that this rank owns. `sums`: their reduction, in memory of the library,
    /// valid during the call. `outs[r]`: the `out` of rank r; no other rank touches these elements of it during the
    /// call. Called for each block of the shard, by one thread at a time, in any order. If it throws, the collective
    /// fails on all ranks, and the errors name this rank.
    virtual void step(ElementRange range, ConstBufferView sums, ListView<void* const> outs) = 0;

protected:
    ~ShardStep() = default;
};

namespace detail {

/// `rank`'s part of a buffer that is split over `size` ranks.
inline BufferView shard_of(BufferView whole, int size, int rank) noexcept {
    const ElementRange own = shard_range(whole.count, size, rank);
    return whole.subview(own.first, own.size());
}

}  // namespace detail

}  // namespace gradsync::inline v0_2
