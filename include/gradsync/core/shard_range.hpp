// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

#include "buffer_view.hpp"

namespace gradsync::inline v0_2 {

/// A range of elements, [first, last).
struct ElementRange {
    std::size_t first = 0;
    std::size_t last = 0;

    constexpr std::size_t size() const noexcept { return last - first; }
    friend constexpr bool operator==(ElementRange, ElementRange) = default;
};

/// The part of `count` elements that belongs to `rank`: `ceil(count / size)` elements each, in rank order, so
/// that only the last shards are shorter, or empty (`torch.chunk`'s rule). Every collective that splits a
/// buffer over the ranks splits it so.
constexpr ElementRange shard_range(std::size_t count, int size, int rank) noexcept {
    const std::size_t each = (count + static_cast<std::size_t>(size) - 1) / static_cast<std::size_t>(size);
    const auto limited = [count](std::size_t element) { return element < count ? element : count; };
    return {limited(each * static_cast<std::size_t>(rank)), limited(each * (static_cast<std::size_t>(rank) + 1))};
}

namespace detail {

/// `rank`'s part of a buffer that is split over `size` ranks.
inline BufferView shard_of(BufferView whole, int size, int rank) noexcept {
    const ElementRange own = shard_range(whole.count, size, rank);
    return whole.subview(own.first, own.size());
}

}  // namespace detail

}  // namespace gradsync::inline v0_2
