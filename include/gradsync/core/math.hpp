// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

/// @file
/// Small arithmetic functions, in place of `<cmath>` and `<algorithm>`, which take long to compile.

namespace gradsync::inline v0_2::detail {

template <class T>
constexpr T smaller(T a, T b) noexcept {
    return b < a ? b : a;
}
template <class T>
constexpr T larger(T a, T b) noexcept {
    return a < b ? b : a;
}

/// `n / unit`, rounded up.
constexpr std::size_t divide_up(std::size_t n, std::size_t unit) noexcept { return (n + unit - 1) / unit; }
/// The smallest multiple of `unit` that is at least `n`.
constexpr std::size_t round_up(std::size_t n, std::size_t unit) noexcept { return divide_up(n, unit) * unit; }

constexpr std::size_t line_bytes = 64;  ///< size of a cache line

/// `bytes` rounded up to whole cache lines. Objects that are allocated together lie whole lines apart.
constexpr std::size_t in_lines(std::size_t bytes) noexcept { return round_up(bytes, line_bytes); }

/// Sorts a list or vector by `before(a, b)`. The sort is stable.
template <class Elements, class Before>
void sort_by(Elements& elements, Before&& before) {
    const std::size_t n = elements.size();
    std::size_t sorted = 1;
    while (sorted < n && !before(elements[sorted], elements[sorted - 1])) ++sorted;
    if (sorted >= n) return;  // often: parameters lie in memory in their order
    Elements merged = elements;
    for (std::size_t run = 1; run < n; run *= 2) {  // runs of this length are sorted; merges pairs of them
        for (std::size_t at = 0; at < n;) {
            const std::size_t middle = smaller(at + run, n), last = smaller(middle + run, n);
            for (std::size_t left = at, right = middle; at < last; ++at) {
                const bool takes_left = right == last || (left < middle && !before(elements[right], elements[left]));
                merged[at] = std::move(elements[takes_left ? left++ : right++]);
            }
        }
        std::swap(elements, merged);
    }
}

/// The 64-bit FNV-1a hash of `bytes` bytes. Pass the hash of the bytes before them as `hash` to continue it.
inline std::uint64_t fnv1a(const void* data, std::size_t bytes, std::uint64_t hash = 0xcbf29ce484222325u) noexcept {
    for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3u;
    return hash;
}

/// The next number of SplitMix64 (Steele, Lea, Flood, 2014).
constexpr std::uint64_t split_mix(std::uint64_t& state) noexcept {
    std::uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/// True if `x` is neither infinite nor NaN. It tests the bits, so that it is right under `-ffast-math` as well.
constexpr bool is_finite(double x) noexcept {
    constexpr std::uint64_t exponent = 0x7ff0'0000'0000'0000u;
    return (std::bit_cast<std::uint64_t>(x) & exponent) != exponent;
}
constexpr bool is_finite(float x) noexcept { return is_finite(static_cast<double>(x)); }

inline double square_root(double x) noexcept { return __builtin_sqrt(x); }

// ---------------------------------------------------------------------------------------------------- the tree of sums

// The order of sums. The summands are the leaves of a binary tree, in their order. A node over more than one leaf is
// the sum of its left half, which has as many leaves as the largest power of two below the node's count, and its right
// half. The sum of an aligned run of leaves is therefore a node of the tree, whichever rank computes it, and rounding
// errors grow with the logarithm of the number of leaves. The order of a sum's two operands does not change its bits.
//
// To add up leaves one after the other, keep a stack of sums: push a leaf, and while the two on top are the halves of a
// node, replace them by their sum.

/// The number of leaves of the left half of a node over `leaves` leaves, two at least.
constexpr std::size_t left_half(std::size_t leaves) noexcept { return std::bit_ceil(leaves) / 2; }

/// Returns whether the nodes [first, middle) and [middle, last) are the halves of a node
/// of the tree over `leaves` leaves.
constexpr bool are_halves(std::size_t first, std::size_t middle, std::size_t last, std::size_t leaves) noexcept {
    const std::size_t half = left_half(last - first);
    return first % (2 * half) == 0 && middle - first == half && (last - first == 2 * half || last == leaves);
}

/// The number of sums that follow leaf i of the tree over `leaves` leaves, for all i in their order.
constexpr unsigned sums_after(std::size_t i, std::size_t leaves) noexcept {
    return static_cast<unsigned>(i + 1 < leaves ? std::countr_zero(i + 1) : std::popcount(i));
}

/// The largest number of sums on the stack before the last of `leaves` leaves (at least 1) is pushed.
constexpr std::size_t open_sums(std::size_t leaves) noexcept {
    // Not std::bit_width, whose type differs between libraries: a cast of it is useless in one of them, and g++ warns.
    return static_cast<std::size_t>(std::numeric_limits<std::size_t>::digits - 1 - std::countl_zero(leaves));
}

/// The largest number of sums on the stack, the last leaf included, for up to a million leaves.
inline constexpr std::size_t max_open_sums = 21;

}  // namespace gradsync::inline v0_2::detail
