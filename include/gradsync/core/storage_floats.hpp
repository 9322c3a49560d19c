// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "always_inline.hpp"

namespace gradsync::inline v0_2 {

namespace kernel::detail {

/// Signed integers of the size of `Bits`, which is std::uint32_t or a pack of them. SSE2 compares no others.
template <class Bits>
using SignedBits = std::conditional_t<std::is_integral_v<Bits>, std::int32_t, decltype(Bits{} < Bits{})>;

/// Sets `result` to `yes` if `condition` holds, without a branch; in packs, element by element.
template <class Condition, class Bits>
GRADSYNC_ALWAYS_INLINE constexpr void replace_where(const Condition& condition, const Bits& yes,
                                                    Bits& result) noexcept {
    if constexpr (std::is_same_v<Condition, bool>) result ^= (yes ^ result) & (Bits{0} - static_cast<Bits>(condition));
    else result = condition ? yes : result;
}

/// Rounds `value` to the type To of 16 or 8 bits, whose bits become the lower bits of `code`.
/// Like `widen`, it works on single numbers and on packs; hence the reference parameters, and __builtin_bit_cast
/// instead of the function std::bit_cast.
template <class To, class Value, class Bits>
GRADSYNC_ALWAYS_INLINE constexpr void narrow(const Value& value, Bits& code) noexcept {
    using Signed = SignedBits<Bits>;
    constexpr int drop = 23 - To::mantissa;
    constexpr std::uint32_t sign_bit = 0x8000'0000u;
    constexpr std::int32_t infinity = 0x7f80'0000;
    constexpr std::uint32_t rebias = std::uint32_t{127 - To::bias} << 23;
    constexpr std::uint32_t just_below_half = (1u << (drop - 1)) - 1;

    const Bits bits = __builtin_bit_cast(Bits, value);
    const Bits magnitude = bits & ~sign_bit;
    if constexpr (rebias == 0) {  // the same exponents: the sign can stay in place
        code = (bits + just_below_half + ((bits >> drop) & 1)) >> drop;
        replace_where(Signed(magnitude) > infinity, Bits((bits >> drop) | std::uint32_t{To::quiet_nan}), code);
    } else {
        code = (magnitude - rebias + just_below_half + ((magnitude >> drop) & 1)) >> drop;
        // Below the least normal number of To, the adder rounds: the power of two that is added has To's least denormal
        // as its last place. No operand that matters and no result is denormal, so flush-to-zero changes nothing.
        constexpr auto min_normal = static_cast<std::int32_t>(rebias + (1u << 23));
        constexpr std::uint32_t magic = std::uint32_t{127 + 1 - To::bias + drop} << 23;
        const Value rounded = __builtin_bit_cast(Value, magnitude) + __builtin_bit_cast(float, magic);
        replace_where(Signed(magnitude) < min_normal, Bits(__builtin_bit_cast(Bits, rounded) - magic), code);
        // Too large: infinity, or in 8 bits the largest number.
        const Signed unlimited = Signed(code), limit = Signed{} + (To::largest + (sizeof(To) == 2 ? 1 : 0));
        code = Bits(unlimited < limit ? unlimited : limit);
        const Bits payload = (magnitude >> drop) & ((1u << To::mantissa) - 1);
        replace_where(Signed(magnitude) > infinity, Bits(payload | std::uint32_t{To::quiet_nan}), code);
        code |= (bits & sign_bit) >> (32 - 8 * sizeof(To));
    }
}

/// Widens numbers of the type From of 16 or 8 bits, which are in the lower bits of `code`. Exact.
template <class From, class Value, class Bits>
GRADSYNC_ALWAYS_INLINE constexpr void widen(const Bits& code, Value& value) noexcept {
    using Signed = SignedBits<Bits>;
    constexpr int drop = 23 - From::mantissa;
    constexpr std::uint32_t rebias = std::uint32_t{127 - From::bias} << 23, sign_bit = 0x80u << (8 * sizeof(From) - 8);
    if constexpr (rebias == 0) {
        value = __builtin_bit_cast(Value, code << drop);
    } else {
        const Bits magnitude = code & (sign_bit - 1);
        Bits bits = (magnitude << drop) + rebias;
        // Infinity or NaN: exponent 255.
        replace_where(Signed(magnitude) > int{From::largest}, Bits(bits + rebias), bits);
        // A denormal becomes the mantissa of the least normal number times 1 + m. Subtracting that number is exact.
        const Value denormal =
            __builtin_bit_cast(Value, bits + (1u << 23)) - __builtin_bit_cast(float, rebias + (1u << 23));
        replace_where(Signed(magnitude) < 1 << From::mantissa, __builtin_bit_cast(Bits, denormal), bits);
        value = __builtin_bit_cast(Value, bits | (code & sign_bit) << (32 - 8 * sizeof(From)));
    }
}

}  // namespace kernel::detail

/// Storage types for floating-point numbers of 16 and 8 bits. They only convert: arithmetic happens in `float`.
/// `Float16` is IEEE 754 binary16, `BFloat16` is the upper half of a binary32, and the types of 8 bits are those of the
/// Open Compute Project (OFP8).
///
/// | | `Float16` | `BFloat16` | `Float8E4M3` | `Float8E5M2` |
/// |---|---|---|---|---|
/// | exponent, mantissa, bias | 5, 10, 15 | 8, 7, 127 | 4, 3, 7 | 5, 2, 15 |
/// | largest | 65504 | 3.39e38 | 448 | 57344 |
/// | least normal, denormal | 2^-14, 2^-24 | 2^-126, 2^-133 | 2^-6, 2^-9 | 2^-14, 2^-16 |
/// | infinities | 0x7c00, 0xfc00 | 0x7f80, 0xff80 | none | 0x7c, 0xfc |
///
/// From `float` they round to nearest, ties to even. Denormals are kept. A NaN stays a NaN (quiet, with its upper
/// payload bits). In 16 bits a number that is too large becomes infinity. Types of 8 bits saturate: a number that is
/// too large, even an infinity, becomes the largest number. The types of CUDA's cuda_fp8.h and NCCL's sums saturate as
/// well (__NV_SATFINITE), so a number gets the same bits wherever it is rounded. (CUDA keeps neither the sign nor the
/// payload of a NaN.) PyTorch gives NaN (E4M3) or infinity (E5M2) instead.
///
/// The conversions are also correct under `-ffast-math` and flush-to-zero.
template <int exponent_bits, int mantissa_bits>
class StorageFloat {
    static constexpr bool is_wide = exponent_bits + mantissa_bits == 15;
    static constexpr bool has_infinity = exponent_bits != 4;
    static constexpr int top = ((1 << exponent_bits) - 1) << mantissa_bits;  // the bits of infinity, if there is one
    static_assert(is_wide || exponent_bits + mantissa_bits == 7,
                  "gradsync: use Float16, BFloat16, Float8E4M3 or Float8E5M2");

public:
    using Bits = std::conditional_t<is_wide, std::uint16_t, std::uint8_t>;

    StorageFloat() = default;
    /// Not from double, which would be rounded twice: cast to float if you want that, or use kernel::convert.
    template <std::same_as<double> T>
    explicit StorageFloat(T) = delete;
    GRADSYNC_ALWAYS_INLINE constexpr explicit StorageFloat(float value) noexcept {
        std::uint32_t code = 0;
        kernel::detail::narrow<StorageFloat>(value, code);
        bits_ = static_cast<Bits>(code);
    }

    GRADSYNC_ALWAYS_INLINE constexpr explicit operator float() const noexcept {
        float value = 0;
        kernel::detail::widen<StorageFloat>(std::uint32_t{bits_}, value);
        return value;
    }

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

    static constexpr Bits largest = has_infinity ? top - 1 : top | 6;  ///< the bits of the largest number
    /// The bits of a NaN without payload.
    static constexpr Bits quiet_nan = has_infinity ? top | 1 << (mantissa_bits - 1) : top | 7;

private:
    Bits bits_;
};

using Float16 = StorageFloat<5, 10>;
using BFloat16 = StorageFloat<8, 7>;
using Float8E4M3 = StorageFloat<4, 3>;  ///< float8_e4m3fn in PyTorch; the usual type for weights and activations
using Float8E5M2 = StorageFloat<5, 2>;  ///< the upper half of a binary16, up to rounding; the usual type for gradients

static_assert(sizeof(Float16) == 2 && sizeof(Float8E4M3) == 1);

}  // namespace gradsync::inline v0_2
