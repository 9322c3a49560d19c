// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>

namespace gradsync::inline v0_2 {

/// Storage type for bfloat16: the upper half of an IEEE 754 binary32. It converts, and does nothing else:
/// arithmetic happens in `float`.
///
/// From `float` it rounds to nearest, ties to even; overflow gives infinity; NaN stays NaN (quiet, upper
/// payload bits kept); denormals are kept. The conversions use integer arithmetic alone, so they are right
/// under `-ffast-math` and flush-to-zero as well.
class BFloat16 {
public:
    BFloat16() = default;
    /// Not from double, which would be rounded twice: cast to float where that is meant, or use kernel::convert.
    template <std::same_as<double> T>
    explicit BFloat16(T) = delete;
    constexpr explicit BFloat16(float value) noexcept : bits_(round(std::bit_cast<std::uint32_t>(value))) {}

    constexpr explicit operator float() const noexcept { return std::bit_cast<float>(static_cast<std::uint32_t>(bits_) << 16); }

    static constexpr BFloat16 from_bits(std::uint16_t bits) noexcept {
        BFloat16 result;
        result.bits_ = bits;
        return result;
    }
    constexpr std::uint16_t bits() const noexcept { return bits_; }

    /// Compares the bits: +0 and -0 differ, a NaN equals itself.
    friend constexpr bool operator==(BFloat16, BFloat16) = default;

private:
    static constexpr std::uint16_t round(std::uint32_t f) noexcept {
        if ((f & 0x7fff'ffffu) > 0x7f80'0000u) return static_cast<std::uint16_t>((f >> 16) | 0x0040u);
        return static_cast<std::uint16_t>((f + 0x7fffu + ((f >> 16) & 1u)) >> 16);
    }

    std::uint16_t bits_;
};

static_assert(sizeof(BFloat16) == 2);

}  // namespace gradsync::inline v0_2
