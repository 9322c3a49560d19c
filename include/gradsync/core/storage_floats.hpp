// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <type_traits>

namespace gradsync::inline v0_2 {

/// Storage types for floating-point numbers of 16 and 8 bits. They only convert: arithmetic happens in `float`. `Float16` is IEEE 754
/// binary16, `BFloat16` is the upper half of a binary32, and the types of 8 bits are those of the Open Compute Project (OFP8).
///
/// | | `Float16` | `BFloat16` | `Float8E4M3` | `Float8E5M2` |
/// |---|---|---|---|---|
/// | exponent, mantissa, bias | 5, 10, 15 | 8, 7, 127 | 4, 3, 7 | 5, 2, 15 |
/// | largest | 65504 | 3.39e38 | 448 | 57344 |
/// | least normal, denormal | 2^-14, 2^-24 | 2^-126, 2^-133 | 2^-6, 2^-9 | 2^-14, 2^-16 |
/// | infinities | 0x7c00, 0xfc00 | 0x7f80, 0xff80 | none | 0x7c, 0xfc |
///
/// From `float` they round to nearest, ties to even. Denormals are kept. A NaN stays a NaN (quiet, with its upper payload bits). In 16 bits a
/// number that is too large becomes infinity. Types of 8 bits saturate: a number that is too large, even an infinity, becomes the largest
/// number. The types of CUDA's cuda_fp8.h and NCCL's sums saturate as well (__NV_SATFINITE), so a number gets the same bits wherever it is
/// rounded. (CUDA keeps neither the sign nor the payload of a NaN.) PyTorch gives NaN (E4M3) or infinity (E5M2) instead.
///
/// The conversions use integer arithmetic alone, so they are right under `-ffast-math` and flush-to-zero as well. The types have no common
/// base class, because one makes conversions between Float16 and BFloat16 a tenth slower (g++ 12).
template <int exponent_bits, int mantissa_bits>
class StorageFloat {
    static constexpr bool is_wide = exponent_bits + mantissa_bits == 15;
    static constexpr bool has_infinity = exponent_bits != 4;
    static constexpr int top = ((1 << exponent_bits) - 1) << mantissa_bits;  // the bits of infinity, if there is one
    static_assert(is_wide || exponent_bits + mantissa_bits == 7, "gradsync: use Float16, BFloat16, Float8E4M3 or Float8E5M2");

public:
    using Bits = std::conditional_t<is_wide, std::uint16_t, std::uint8_t>;

    StorageFloat() = default;
    /// Not from double, which would be rounded twice: cast to float if you want that, or use kernel::convert.
    template <std::same_as<double> T>
    explicit StorageFloat(T) = delete;
    constexpr explicit StorageFloat(float value) noexcept : bits_(round(std::bit_cast<std::uint32_t>(value))) {}

    constexpr explicit operator float() const noexcept { return std::bit_cast<float>(widen(bits_)); }

    static constexpr StorageFloat from_bits(Bits bits) noexcept {
        StorageFloat result;
        result.bits_ = bits;
        return result;
    }
    constexpr Bits bits() const noexcept { return bits_; }

    /// Compares the bits: +0 and -0 differ, a NaN equals itself.
    friend constexpr bool operator==(StorageFloat, StorageFloat) = default;

    static constexpr int mantissa = mantissa_bits;
    static constexpr int bias = (1 << (exponent_bits - 1)) - 1;

    static constexpr Bits largest = has_infinity ? top - 1 : top | 6;                           ///< the bits of the largest number
    static constexpr Bits quiet_nan = has_infinity ? top | 1 << (mantissa_bits - 1) : top | 7;  ///< of a NaN without payload

private:
    static constexpr int sign_shift = is_wide ? 16 : 24, drop = 23 - mantissa_bits;
    static constexpr std::uint32_t sign_bit = is_wide ? 0x8000 : 0x80, mantissa_mask = (1u << mantissa_bits) - 1u;
    static constexpr bool has_exponents_of_float = exponent_bits == 8;

    static constexpr Bits round(std::uint32_t f) noexcept {
        const std::uint32_t magnitude = f & 0x7fff'ffffu, below_half = (1u << (drop - 1)) - 1u;
        if constexpr (has_exponents_of_float) {  // the sign can stay in place
            if (magnitude > 0x7f80'0000u) return static_cast<Bits>((f >> drop) | quiet_nan);
            return static_cast<Bits>((f + below_half + ((f >> drop) & 1u)) >> drop);
        }
        const std::uint32_t sign = (f >> sign_shift) & sign_bit;
        std::uint32_t code = 0;
        if (magnitude > 0x7f80'0000u) {
            code = quiet_nan | ((magnitude >> drop) & mantissa_mask);
        } else if (is_wide && magnitude >= (128u + bias) << 23) {
            code = top;
        } else if (magnitude >= (128u - bias) << 23) {  // a normal number, or in 8 bits too large
            const std::uint32_t rebias = static_cast<std::uint32_t>(127 - bias) << 23;
            code = (magnitude - rebias + below_half + ((magnitude >> drop) & 1u)) >> drop;
            if (!is_wide && code > largest) code = largest;
        } else if (magnitude >= (127u - bias - mantissa_bits) << 23) {  // half of the least denormal, and above
            const std::uint32_t shift = static_cast<std::uint32_t>(drop + 128 - bias) - (magnitude >> 23);
            const std::uint32_t whole = (magnitude & 0x7f'ffffu) | 0x80'0000u;
            code = whole >> shift;
            const std::uint32_t rest = whole & ((1u << shift) - 1u), tie = 1u << (shift - 1u);
            if (rest > tie || (rest == tie && (code & 1u))) ++code;
        }
        return static_cast<Bits>(sign | code);
    }

    static constexpr std::uint32_t widen(Bits bits) noexcept {
        if constexpr (has_exponents_of_float) return static_cast<std::uint32_t>(bits) << drop;
        const std::uint32_t sign = (bits & sign_bit) << sign_shift;
        const std::uint32_t magnitude = bits & (sign_bit - 1u);
        if (magnitude > largest) return sign | 0x7f80'0000u | ((magnitude & mantissa_mask) << drop);
        if (magnitude >> mantissa_bits != 0) return sign | ((magnitude << drop) + (static_cast<std::uint32_t>(127 - bias) << 23));
        if (magnitude == 0) return sign;
        // Brings the leading one to the exponent's last bit.
        const int shift = std::countl_zero(magnitude) - (31 - mantissa_bits);
        const std::uint32_t fraction = (magnitude << shift) & mantissa_mask;
        return sign | ((fraction << drop) + (static_cast<std::uint32_t>(128 - bias - shift) << 23));
    }

    Bits bits_;
};

using Float16 = StorageFloat<5, 10>;
using BFloat16 = StorageFloat<8, 7>;
using Float8E4M3 = StorageFloat<4, 3>;  ///< float8_e4m3fn in PyTorch; the usual type for weights and activations
using Float8E5M2 = StorageFloat<5, 2>;  ///< the upper half of a binary16, up to rounding; the usual type for gradients

static_assert(sizeof(Float16) == 2 && sizeof(Float8E4M3) == 1);

}  // namespace gradsync::inline v0_2
