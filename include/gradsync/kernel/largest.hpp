// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "isa.hpp"

namespace gradsync::inline v0_2::kernel {

namespace detail {

/// The bits of x without its sign. As integers they order numbers by magnitude, NaN last.
GRADSYNC_ALWAYS_INLINE std::uint32_t magnitude_bits(float x) { return std::bit_cast<std::uint32_t>(x) & 0x7fffffffu; }

/// Calls visit(i, bits) in order for the elements whose magnitude is at least `floor`. Most blocks have none, and are
/// skipped after one vectorised test.
template <class Visit>
GRADSYNC_ALWAYS_INLINE void for_large(const float* data, std::size_t count, std::uint32_t floor, Visit visit) {
    constexpr std::size_t block = 32;
    std::size_t first = 0;
    for (; first + block <= count; first += block) {
        std::uint32_t any = 0;
        for (std::size_t i = 0; i < block; ++i) any |= magnitude_bits(data[first + i]) >= floor ? 1u : 0u;
        if (any == 0) continue;
        for (std::size_t i = first; i < first + block; ++i)
            if (const std::uint32_t bits = magnitude_bits(data[i]); bits >= floor) visit(i, bits);
    }
    for (; first < count; ++first)
        if (const std::uint32_t bits = magnitude_bits(data[first]); bits >= floor) visit(first, bits);
}

struct TakeLargest {
    GRADSYNC_ALWAYS_INLINE static void run(float* data, std::size_t count, std::size_t k, std::uint32_t* places,
                                           float* values) {
        // Finds the k-th largest magnitude digit by digit from the top (11, 10 and 10 bits),
        // and how many elements with it to take.
        std::size_t wanted = k;
        std::uint32_t counts[4][2048] = {};  // four tables, because in one an addition would wait for the one before
        std::size_t i = 0;
        for (; i + 4 <= count; i += 4)
            for (std::size_t t = 0; t < 4; ++t) ++counts[t][magnitude_bits(data[i + t]) >> 20];
        for (; i < count; ++i) ++counts[0][magnitude_bits(data[i]) >> 20];
        for (std::size_t v = 0; v < 2048; ++v) counts[0][v] += counts[1][v] + counts[2][v] + counts[3][v];
        std::uint32_t kth = digit_of(counts[0], 2047, wanted) << 20;
        for (unsigned shift = 10;; shift = 0) {
            for (std::size_t v = 0; v < 1024; ++v) counts[0][v] = 0;
            const std::uint32_t above = kth >> shift >> 10;
            for_large(data, count, kth, [&](std::size_t, std::uint32_t bits) {
                if (bits >> shift >> 10 == above) ++counts[0][bits >> shift & 1023];
            });
            kth |= digit_of(counts[0], 1023, wanted) << shift;
            if (shift == 0) break;
        }
        std::size_t taken = 0;
        for_large(data, count, kth, [&](std::size_t place, std::uint32_t bits) {
            if (bits == kth) {
                if (wanted == 0) return;
                --wanted;
            }
            places[taken] = static_cast<std::uint32_t>(place);
            values[taken++] = data[place];
            data[place] = 0;
        });
    }

private:
    /// The digit of the `wanted`-th largest element; `wanted` becomes its rank among the elements with this digit.
    GRADSYNC_ALWAYS_INLINE static std::uint32_t digit_of(const std::uint32_t* counts, std::uint32_t digit,
                                                         std::size_t& wanted) {
        for (; counts[digit] < wanted; --digit) wanted -= counts[digit];
        return digit;
    }
};

struct LargestMagnitude {
    GRADSYNC_ALWAYS_INLINE static void run(const float* x, std::size_t count, std::uint32_t* result) {
        constexpr std::size_t block = 64;
        std::uint32_t largest[block] = {};
        std::size_t first = 0;
        for (; first + block <= count; first += block)
            for (std::size_t i = 0; i < block; ++i) largest[i] = larger_of(largest[i], magnitude_bits(x[first + i]));
        for (; first < count; ++first) largest[0] = larger_of(largest[0], magnitude_bits(x[first]));
        for (const std::uint32_t bits : largest) *result = larger_of(*result, bits);
    }
    GRADSYNC_ALWAYS_INLINE static std::uint32_t larger_of(std::uint32_t a, std::uint32_t b) { return a < b ? b : a; }
};

}  // namespace detail

/// The largest magnitude of the elements; 0 if there are none, not finite if an element is not finite.
inline float largest_magnitude(const float* x, std::size_t count) {
    std::uint32_t bits = 0;
    dispatch<detail::LargestMagnitude>(x, count, &bits);
    return std::bit_cast<float>(bits);
}

/// Takes the k elements of largest magnitude out of `data`. Writes their k indices, ascending, and their k values,
/// and sets them to 0 in `data`. A NaN is larger than every number; of equal magnitudes the first are taken.
/// k <= count < 2^32. Exact.
inline void take_largest(float* data, std::size_t count, std::size_t k, std::uint32_t* places, float* values) {
    if (k != 0) dispatch<detail::TakeLargest>(data, count, k, places, values);
}

}  // namespace gradsync::inline v0_2::kernel
