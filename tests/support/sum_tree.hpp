// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <optional>

namespace gradsync_test {

/// The sum of the leaves [first, last), straight from the definition: the left half has as many leaves as the largest power of two below
/// their number. `leaf(i)`: an optional value; `add(a, b)`: their sum. Nothing is the sum of nothing.
template <class Leaf, class Add>
auto tree_sum(std::size_t first, std::size_t last, Leaf&& leaf, Add&& add) -> decltype(leaf(first)) {
    if (last - first == 0) return std::nullopt;
    if (last - first == 1) return leaf(first);
    std::size_t half = 1;
    while (2 * half < last - first) half *= 2;
    const auto left = tree_sum(first, first + half, leaf, add), right = tree_sum(first + half, last, leaf, add);
    if (left && right) return add(*left, *right);
    return left ? left : right;
}

}  // namespace gradsync_test
