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

}  // namespace gradsync::inline v0_2::kernel
