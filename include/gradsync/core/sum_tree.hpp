// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <cstddef>

/// The order of sums. The summands are the leaves of a binary tree, in their order. A node over more than one leaf is the sum of its left
/// half, which has as many leaves as the largest power of two below the node's count, and its right half. So the sum of aligned runs of
/// leaves is part of the sum of all, whoever adds them up, and a rounding error grows with the logarithm of the number of leaves. An operand
/// of a sum may come first or second: that does not change its bits.
///
/// To add up leaves one after the other, keep a stack of sums: push a leaf, and as long as the two on top are the halves of a node, put
/// their sum in their place.

namespace gradsync::inline v0_2::detail {

/// The number of leaves of the left half of a node over `leaves` leaves, two at least.
constexpr std::size_t left_half(std::size_t leaves) noexcept { return std::bit_ceil(leaves) / 2; }

/// Are the runs [first, middle) and [middle, last), which are nodes, the halves of a node of the tree over `leaves` leaves?
constexpr bool are_halves(std::size_t first, std::size_t middle, std::size_t last, std::size_t leaves) noexcept {
    const std::size_t half = left_half(last - first);
    return first % (2 * half) == 0 && middle - first == half && (last - first == 2 * half || last == leaves);
}

/// The number of sums that follow leaf i of the tree over `leaves` leaves, for all i in their order.
constexpr unsigned sums_after(std::size_t i, std::size_t leaves) noexcept {
    return static_cast<unsigned>(i + 1 < leaves ? std::countr_zero(i + 1) : std::popcount(i));
}

/// The most sums that are on the stack at a time before the last of `leaves` leaves, one at least, comes.
constexpr std::size_t open_sums(std::size_t leaves) noexcept { return static_cast<std::size_t>(std::bit_width(leaves)) - 1; }

/// The same with the last one, of up to a million leaves.
inline constexpr std::size_t max_open_sums = 21;

}  // namespace gradsync::inline v0_2::detail
