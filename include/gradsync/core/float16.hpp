// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>

namespace gradsync::inline v0_2 {

/// Storage type for IEEE 754 binary16. It converts, and does nothing else: arithmetic happens in `float`.
///
/// From `float` it rounds to nearest, ties to even; overflow gives infinity; NaN stays NaN (quiet, upper
/// payload bits kept); denormals are kept. The conversions use integer arithmetic alone, so they are right
/// under `-ffast-math` and flush-to-zero as well.
class Float16 {
public:
    Float16() = default;
    /// Not from double, which would be rounded twice: cast to float where that is meant, or use kernel::convert.
    template <std::same_as<double> T>
    explicit Float16(T) = delete;
    constexpr explicit Float16(float value) noexcept : bits_(round(std::bit_cast<std::uint32_t>(value))) {}

    constexpr explicit operator float() const noexcept { return std::bit_cast<float>(widen(bits_)); }

    static constexpr Float16 from_bits(std::uint16_t bits) noexcept {
        Float16 result;
        result.bits_ = bits;
        return result;
    }
    constexpr std::uint16_t bits() const noexcept { return bits_; }

    /// Compares the bits: +0 and -0 differ, a NaN equals itself.
    friend constexpr bool operator==(Float16, Float16) = default;

private:
    static constexpr std::uint16_t round(std::uint32_t f) noexcept {
        const std::uint32_t sign = (f >> 16) & 0x8000u;
        const std::uint32_t magnitude = f & 0x7fff'ffffu;
        std::uint32_t half = 0;
        if (magnitude > 0x7f80'0000u) {
            half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
        } else if (magnitude >= 0x4780'0000u) {  // 2^16 and above: infinity
            half = 0x7c00u;
        } else if (magnitude >= 0x3880'0000u) {  // 2^-14 and above: a normal number (it may round up to infinity)
            half = (magnitude - 0x3800'0000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        } else if (magnitude > 0x3300'0000u) {  // above 2^-25, half of the least denormal: a denormal
            const std::uint32_t shift = 126u - (magnitude >> 23);
            const std::uint32_t mantissa = (magnitude & 0x7f'ffffu) | 0x80'0000u;
            const std::uint32_t kept = mantissa >> shift;
            const std::uint32_t rest = mantissa & ((1u << shift) - 1u);
            const std::uint32_t tie = 1u << (shift - 1u);
            half = kept + ((rest > tie || (rest == tie && (kept & 1u))) ? 1u : 0u);
        }
        return static_cast<std::uint16_t>(sign | half);
    }

    static constexpr std::uint32_t widen(std::uint16_t h) noexcept {
        const std::uint32_t sign = (h & 0x8000u) << 16;
        const std::uint32_t exponent = (h >> 10) & 0x1fu;
        std::uint32_t mantissa = h & 0x3ffu;
        if (exponent == 0x1fu) return sign | 0x7f80'0000u | (mantissa << 13);
        if (exponent != 0) return sign | ((exponent + 112u) << 23) | (mantissa << 13);
        if (mantissa == 0) return sign;
        const int shift = std::countl_zero(mantissa) - 21;  // brings the leading one to bit 10
        mantissa = (mantissa << shift) & 0x3ffu;
        return sign | (static_cast<std::uint32_t>(113 - shift) << 23) | (mantissa << 13);
    }

    std::uint16_t bits_;
};

static_assert(sizeof(Float16) == 2);

}  // namespace gradsync::inline v0_2
