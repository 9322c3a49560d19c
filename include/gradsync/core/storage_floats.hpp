// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>

// The three classes repeat their members, because a common base makes conversions between Float16 and BFloat16 a tenth slower (g++ 12).

namespace gradsync::inline v0_2 {

/// Storage type for IEEE 754 binary16. It only converts: arithmetic happens in `float`.
///
/// From `float` it rounds to nearest, ties to even; overflow gives infinity; NaN stays NaN (quiet, upper
/// payload bits kept); denormals are kept. The conversions use integer arithmetic alone, so they are right
/// under `-ffast-math` and flush-to-zero as well.
class Float16 {
public:
    Float16() = default;
    /// Not from double, which would be rounded twice: cast to float if you want that, or use kernel::convert.
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

/// Storage type for the 8-bit floating types of the Open Compute Project (OFP8). It converts, and does nothing else:
/// arithmetic happens in `float`.
///
/// | | `Float8E4M3` | `Float8E5M2` |
/// |---|---|---|
/// | exponent, mantissa, bias | 4, 3, 7 | 5, 2, 15 |
/// | largest | 448 | 57344 |
/// | least normal, denormal | 2^-6, 2^-9 | 2^-14, 2^-16 |
/// | infinities | none | 0x7c, 0xfc |
/// | NaN | 0x7f, 0xff | 0x7d to 0x7f, 0xfd to 0xff |
///
/// From `float` it rounds to nearest, ties to even; denormals are kept; NaN stays NaN (quiet, upper payload bits kept).
/// It saturates: what is too large, an infinity too, becomes the largest number, of both types. So do the types of
/// CUDA's cuda_fp8.h (__NV_SATFINITE), and with them NCCL's sums: a number is to become the same bits wherever it is
/// rounded. (Of a NaN CUDA keeps neither sign nor payload.) PyTorch gives NaN (E4M3) or infinity (E5M2) there. The
/// conversions use integer arithmetic alone, so they are right under `-ffast-math` and flush-to-zero as well.
template <int exponent_bits, int mantissa_bits>
class Float8 {
public:
    Float8() = default;
    /// Not from double, which would be rounded twice: cast to float where that is meant, or use kernel::convert.
    template <std::same_as<double> T>
    explicit Float8(T) = delete;
    constexpr explicit Float8(float value) noexcept : bits_(round(std::bit_cast<std::uint32_t>(value))) {}

    constexpr explicit operator float() const noexcept { return std::bit_cast<float>(widen(bits_)); }

    static constexpr Float8 from_bits(std::uint8_t bits) noexcept {
        Float8 result;
        result.bits_ = bits;
        return result;
    }
    constexpr std::uint8_t bits() const noexcept { return bits_; }

    /// Compares the bits: +0 and -0 differ, a NaN equals itself.
    friend constexpr bool operator==(Float8, Float8) = default;

    static constexpr int mantissa = mantissa_bits;
    static constexpr int bias = (1 << (exponent_bits - 1)) - 1;
    static constexpr std::uint8_t largest = mantissa_bits == 3 ? 0x7e : 0x7b;    ///< the bits of the largest number
    static constexpr std::uint8_t quiet_nan = mantissa_bits == 3 ? 0x7f : 0x7e;  ///< of a NaN without payload

private:
    static_assert((exponent_bits == 4 && mantissa_bits == 3) || (exponent_bits == 5 && mantissa_bits == 2),
                  "gradsync: use Float8E4M3 or Float8E5M2");
    static constexpr int drop = 23 - mantissa_bits;

    static constexpr std::uint8_t round(std::uint32_t f) noexcept {
        const std::uint32_t sign = (f >> 24) & 0x80u;
        const std::uint32_t magnitude = f & 0x7fff'ffffu;
        std::uint32_t code = 0;
        if (magnitude > 0x7f80'0000u) {
            code = quiet_nan | ((magnitude >> drop) & ((1u << mantissa_bits) - 1u));
        } else if (magnitude >> 23 >= 128u - bias) {  // a normal number, or too large
            const std::uint32_t rebias = static_cast<std::uint32_t>(127 - bias) << 23, below_half = (1u << (drop - 1)) - 1u;
            code = (magnitude - rebias + below_half + ((magnitude >> drop) & 1u)) >> drop;
            if (code > largest) code = largest;
        } else if (magnitude >> 23 >= 127u - bias - mantissa_bits) {  // half of the least denormal, and above
            const std::uint32_t shift = static_cast<std::uint32_t>(drop + 128 - bias) - (magnitude >> 23);
            const std::uint32_t whole = (magnitude & 0x7f'ffffu) | 0x80'0000u;
            code = whole >> shift;
            const std::uint32_t rest = whole & ((1u << shift) - 1u), tie = 1u << (shift - 1u);
            if (rest > tie || (rest == tie && (code & 1u))) ++code;
        }
        return static_cast<std::uint8_t>(sign | code);
    }

    static constexpr std::uint32_t widen(std::uint8_t bits) noexcept {
        const std::uint32_t sign = (bits & 0x80u) << 24;
        const std::uint32_t magnitude = bits & 0x7fu;
        if (magnitude > largest) return sign | 0x7f80'0000u | ((magnitude & ((1u << mantissa_bits) - 1u)) << drop);
        if (magnitude >> mantissa_bits != 0) return sign | ((magnitude << drop) + (static_cast<std::uint32_t>(127 - bias) << 23));
        if (magnitude == 0) return sign;
        // Brings the leading one to the exponent's last bit.
        const int shift = std::countl_zero(magnitude) - (31 - mantissa_bits);
        const std::uint32_t fraction = (magnitude << shift) & ((1u << mantissa_bits) - 1u);
        return sign | ((fraction << drop) + (static_cast<std::uint32_t>(128 - bias - shift) << 23));
    }

    std::uint8_t bits_;
};

using Float8E4M3 = Float8<4, 3>;  ///< float8_e4m3fn in PyTorch; the usual type for weights and activations
using Float8E5M2 = Float8<5, 2>;  ///< the upper half of a binary16, up to rounding; the usual type for gradients

}  // namespace gradsync::inline v0_2
