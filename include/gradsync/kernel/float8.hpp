// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../core/dtype.hpp"

/// The 8-bit floating types go through the kernels of f32: a table widens blocks of them, and one loop rounds for both types. They have no
/// other loops, and these are not compiled for every instruction set: every program pays for compiling a kernel, even if it never uses such
/// a type.

namespace gradsync::inline v0_2::kernel::detail {

/// The number of elements that are processed at a time.
inline constexpr std::size_t float8_block = 1024;

/// The constants of one type's conversions. They are data, so that the conversions are compiled once for both types.
struct Float8Format {
    std::int32_t mantissa, bias;
    std::int32_t largest, quiet_nan;                                            ///< codes
    float values[256] = {};                                                     ///< by code
    std::int32_t drop = 23 - mantissa;                                          ///< the mantissa bits that f32 has in addition
    std::int32_t rebias = (127 - bias) << 23, min_normal = (128 - bias) << 23;  ///< in bits of an f32
    std::int32_t magic = (128 - bias + drop) << 23;  ///< the bits of an f32 whose last place is the type's least denormal
    std::int32_t payload = (1 << mantissa) - 1;      ///< the mask of the mantissa bits

    template <class F>
    static Float8Format of() noexcept {
        Float8Format format{F::mantissa, F::bias, F::largest, F::quiet_nan};
        for (unsigned code = 0; code < 256; ++code) format.values[code] = static_cast<float>(F::from_bits(static_cast<std::uint8_t>(code)));
        return format;
    }
};

template <class = void>
const Float8Format& format_of(DType type) noexcept {
    static const Float8Format e4m3 = Float8Format::of<Float8E4M3>(), e5m2 = Float8Format::of<Float8E5M2>();
    return type == DType::f8e4m3 ? e4m3 : e5m2;
}

/// Widens `n` elements of `type`.
template <class = void>
void widen_float8(const void* from, DType type, float* to, std::size_t n) noexcept {
    const float* const values = format_of(type).values;
    const auto* const codes = static_cast<const std::uint8_t*>(from);
    for (std::size_t i = 0; i < n; ++i) to[i] = values[codes[i]];
}

/// Rounds `n` elements, at most `float8_block`, to `type`. The bits are those of `StorageFloat`. Its loops have no branches and a constant
/// length, as those of convert.hpp do; the last one is padded.
template <class = void>
void round_float8(const float* from, std::size_t n, void* to, DType type) noexcept {
    constexpr std::size_t length = 64;
    const Float8Format f = format_of(type);
    const std::int32_t below_half = (1 << (f.drop - 1)) - 1;
    const float magic = __builtin_bit_cast(float, f.magic);
    std::uint8_t codes[float8_block];
    const std::size_t whole = n / length * length;
    float rest[length] = {};
    std::memcpy(rest, from + whole, (n - whole) * sizeof(float));
    for (std::size_t first = 0; first < n; first += length) {
        const float* const line = first < whole ? from + first : rest;
        for (std::size_t i = 0; i < length; ++i) {
            const float value = line[i];
            const auto bits = __builtin_bit_cast(std::int32_t, value);
            const std::int32_t magnitude = bits & 0x7fff'ffff;
            const std::int32_t normal = (magnitude - f.rebias + below_half + ((magnitude >> f.drop) & 1)) >> f.drop;
            // See `narrow` in convert.hpp.
            const float shifted = __builtin_bit_cast(float, magnitude) + magic;
            const auto denormal =
                static_cast<std::int32_t>(__builtin_bit_cast(std::uint32_t, shifted) - static_cast<std::uint32_t>(f.magic));
            // The sign of a difference makes the mask: GCC turns conditions into branches, and does not vectorise them.
            std::int32_t code = normal ^ ((normal ^ denormal) & ((magnitude - f.min_normal) >> 31));
            code ^= (code ^ f.largest) & ((f.largest - code) >> 31);
            const std::int32_t nan = f.quiet_nan | ((magnitude >> f.drop) & f.payload);
            code ^= (code ^ nan) & ((0x7f80'0000 - magnitude) >> 31);
            codes[first + i] = static_cast<std::uint8_t>(code | ((bits >> 24) & 0x80));
        }
    }
    std::memcpy(to, codes, n);
}

/// Converts `n` elements. An inexact result gets an odd last bit, so that a second rounding, to fewer bits, gives what a single one would.
template <class = void>
void round_to_odd(const double* from, float* to, std::size_t n) noexcept {
    for (std::size_t i = 0; i < n; ++i) {
        // By integers, because a thread may flush denormals to zero. Numbers beyond the range of normal floats are far beyond that of the
        // 8-bit types.
        const auto bits = __builtin_bit_cast(std::uint64_t, from[i]);
        const std::uint64_t magnitude = bits & 0x7fff'ffff'ffff'ffffu, least = std::uint64_t{1023 - 126} << 52;
        std::uint64_t result = (magnitude - (std::uint64_t{1023 - 127} << 52)) >> 29;
        result |= (magnitude & 0x1fff'ffffu) != 0;
        if (magnitude < least) result = magnitude != 0;
        if (magnitude >= std::uint64_t{1023 + 128} << 52) result = 0x7f80'0000u;
        if (magnitude > std::uint64_t{0x7ff} << 52) result = 0x7fc0'0000u | (magnitude >> 29 & 0x7f'ffffu);
        to[i] = __builtin_bit_cast(float, static_cast<std::uint32_t>(result | (bits >> 63 << 31)));
    }
}

}  // namespace gradsync::inline v0_2::kernel::detail
