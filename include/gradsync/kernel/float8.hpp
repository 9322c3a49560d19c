// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../core/dtype.hpp"
#include "convert.hpp"

/// Conversions of the 8-bit floating types: a table of all values widens them, and one loop rounds for both types. They are not compiled for
/// every instruction set.

namespace gradsync::inline v0_2::kernel::detail {

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

template <class F>
const Float8Format& format_of() noexcept {
    static const Float8Format format = Float8Format::of<F>();
    return format;
}

inline void widen_float8(const Float8Format& format, const void* from, float* to, std::size_t n) noexcept {
    const auto* const codes = static_cast<const std::uint8_t*>(from);
    for (std::size_t i = 0; i < n; ++i) to[i] = format.values[codes[i]];
}

/// The bits are those of `StorageFloat`. Its loops have no branches and a constant length, as those of convert.hpp do; the last one is padded.
inline void round_float8(const Float8Format& format, const float* from, void* to, std::size_t n) noexcept {
    constexpr std::size_t length = 64;
    const Float8Format f = format;
    const std::int32_t below_half = (1 << (f.drop - 1)) - 1;
    const float magic = __builtin_bit_cast(float, f.magic);
    for (std::size_t first = 0; first < n; first += length) {
        const std::size_t size = n - first < length ? n - first : length;
        float line[length] = {};
        std::uint8_t codes[length];
        std::memcpy(line, from + first, size * sizeof(float));
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
            codes[i] = static_cast<std::uint8_t>(code | ((bits >> 24) & 0x80));
        }
        std::memcpy(static_cast<std::uint8_t*>(to) + first, codes, size);
    }
}

}  // namespace gradsync::inline v0_2::kernel::detail
