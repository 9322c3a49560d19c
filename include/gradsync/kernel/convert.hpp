#pragma once

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../core/dtype.hpp"
#include "isa.hpp"

/// Bulk conversion between floating types, in host memory.
///
/// Every result has the same bits as the scalar conversions of `Float16` and `BFloat16`, whatever the input: round
/// to nearest, ties to even, overflow to infinity, NaN quiet with its upper payload bits, denormals kept, also where
/// the thread runs with flush-to-zero. From `double`, the 16-bit types are rounded once (never through `float`).
///
/// The loops work on blocks of a constant length, because GCC vectorises nothing else at -O2, and choose by masks
/// instead of branches, because a branch around a floating-point operation keeps GCC from vectorising it.

namespace gradsync::inline v0::kernel {

/// The type in which elements of type T are summed and scaled: `float` for the 16-bit types, T itself otherwise.
template <Element T>
using accumulator_t = std::conditional_t<is_low_precision(dtype_of<T>), float, T>;

namespace detail {

/// The layout of a floating type: its bits as an unsigned integer, its mantissa bits, its exponent bias.
template <class T>
struct Layout;
template <>
struct Layout<Float16> {
    using Bits = std::uint16_t;
    static constexpr int mantissa = 10, bias = 15;
};
template <>
struct Layout<BFloat16> {
    using Bits = std::uint16_t;
    static constexpr int mantissa = 7, bias = 127;
};
template <>
struct Layout<float> {
    using Bits = std::uint32_t;
    static constexpr int mantissa = 23, bias = 127;
};
template <>
struct Layout<double> {
    using Bits = std::uint64_t;
    static constexpr int mantissa = 52, bias = 1023;
};

/// `condition ? yes : no` without a branch.
template <class U>
GRADSYNC_ALWAYS_INLINE constexpr U select(bool condition, U yes, U no) noexcept {
    return no ^ ((yes ^ no) & (U{0} - static_cast<U>(condition)));
}

/// The bits of `value`, a float or double, rounded once to the 16-bit type To.
template <class To, class From>
GRADSYNC_ALWAYS_INLINE std::uint16_t narrow(From value) noexcept {
    using In = Layout<From>;
    using Out = Layout<To>;
    using U = typename In::Bits;
    using S = std::make_signed_t<U>;  // magnitudes are compared as signed numbers: SSE2 has no other comparison
    constexpr int drop = In::mantissa - Out::mantissa;
    constexpr U sign_bit = U{1} << (sizeof(U) * 8 - 1);
    constexpr U infinity = U(2 * In::bias + 1) << In::mantissa;
    constexpr U rebias = U(In::bias - Out::bias) << In::mantissa;
    constexpr U half_infinity = U(2 * Out::bias + 1) << Out::mantissa;
    constexpr U half_quiet = half_infinity | (U{1} << (Out::mantissa - 1));

    const U bits = std::bit_cast<U>(value);
    const U magnitude = bits & ~sign_bit;
    U half = (magnitude - rebias + ((U{1} << (drop - 1)) - 1) + ((magnitude >> drop) & 1)) >> drop;
    if constexpr (rebias != 0) {
        // Below the least normal number of To: adding a power of two whose last place is To's least denormal lets
        // the adder round. No operand that matters and no result is denormal, so flush-to-zero changes nothing.
        constexpr U least_normal = rebias + (U{1} << In::mantissa);
        constexpr U magic = U(In::bias + 1 - Out::bias - Out::mantissa + In::mantissa) << In::mantissa;
        const U denormal = std::bit_cast<U>(std::bit_cast<From>(magnitude) + std::bit_cast<From>(magic)) - magic;
        half = select(S(magnitude) < S(least_normal), denormal, half);
        half = static_cast<U>(std::min(S(half), S(half_infinity)));  // what is too large
    }
    half = select(S(magnitude) > S(infinity), half_quiet | ((magnitude >> drop) & ((U{1} << Out::mantissa) - 1)), half);
    return static_cast<std::uint16_t>(((bits & sign_bit) >> (sizeof(U) * 8 - 16)) | half);
}

GRADSYNC_ALWAYS_INLINE float widen(BFloat16 value) noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits()) << 16);
}

GRADSYNC_ALWAYS_INLINE float widen(Float16 value) noexcept {
    constexpr std::uint32_t rebias = (127u - 15u) << 23;
    const std::uint32_t bits = value.bits();
    const std::uint32_t magnitude = bits & 0x7fffu;
    const std::uint32_t special = select(magnitude >= 0x7c00u, rebias, 0u);  // infinity or NaN: exponent 255
    const std::uint32_t normal = (magnitude << 13) + rebias + special;
    // A denormal is a small integer times 2^-24: exact, and a normal number in float.
    const auto denormal =
        std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
    return std::bit_cast<float>(((bits & 0x8000u) << 16) | select(magnitude < 0x400u, denormal, normal));
}

template <class To, class From>
GRADSYNC_ALWAYS_INLINE To convert_element(From value) noexcept {
    constexpr bool from_half = is_low_precision(dtype_of<From>), to_half = is_low_precision(dtype_of<To>);
    if constexpr (std::is_same_v<To, From>) return value;
    else if constexpr (from_half && to_half) return To::from_bits(narrow<To>(widen(value)));
    else if constexpr (from_half) return static_cast<To>(widen(value));
    else if constexpr (to_half) return To::from_bits(narrow<To>(value));
    else return static_cast<To>(value);
}

template <class To, class From>
GRADSYNC_ALWAYS_INLINE void convert_block(const From* __restrict from, To* __restrict to, std::size_t n) noexcept {
    for (std::size_t i = 0; i < n; ++i) to[i] = convert_element<To>(from[i]);
}

struct Convert {
    static constexpr std::size_t block = 64;

    template <class From, class To>
    GRADSYNC_ALWAYS_INLINE static void run(const From* from, To* to, std::size_t n) noexcept {
        std::size_t i = 0;
        for (; i + block <= n; i += block) convert_block(from + i, to + i, block);
        if (i == n) return;
        From in[block] = {};
        To out[block];
        std::memcpy(in, from + i, (n - i) * sizeof(From));
        convert_block(in, out, block);
        std::memcpy(to + i, out, (n - i) * sizeof(To));
    }
};

}  // namespace detail

/// Widens `n` elements to their accumulator type; for a kernel to use within its own dispatched loop. Vectorised
/// where `n` is a constant at the call. The ranges must not overlap.
template <Element T>
GRADSYNC_ALWAYS_INLINE void load_block(const T* from, accumulator_t<T>* to, std::size_t n) noexcept {
    detail::convert_block(from, to, n);
}

/// Rounds `n` accumulators to their element type; otherwise as `load_block`.
template <Element T>
GRADSYNC_ALWAYS_INLINE void store_block(const accumulator_t<T>* from, T* to, std::size_t n) noexcept {
    detail::convert_block(from, to, n);
}

/// Converts `n` elements of one floating type to another, with the widest vectors that the processor has.
/// The ranges must not overlap; they need no alignment beyond their element's.
template <Element From, Element To>
    requires(is_floating(dtype_of<From>) && is_floating(dtype_of<To>))
void convert(const From* from, To* to, std::size_t n) noexcept {
    if constexpr (std::is_same_v<From, To>) {
        if (n != 0) std::memcpy(to, from, n * sizeof(From));
    } else {
        dispatch<detail::Convert>(from, to, n);
    }
}

/// The same, types known at run time only. Both must be floating types.
inline void convert(const void* from, DType from_type, void* to, DType to_type, std::size_t n) noexcept {
    assert(is_floating(from_type) && is_floating(to_type));
    const auto with_type = [](DType dtype, auto use) {
        switch (dtype) {
            case DType::f16: return use(Float16{});
            case DType::bf16: return use(BFloat16{});
            case DType::f64: return use(double{});
            default: return use(float{});
        }
    };
    with_type(from_type, [&](auto f) {
        with_type(to_type, [&](auto t) { convert(static_cast<const decltype(f)*>(from), static_cast<decltype(t)*>(to), n); });
    });
}

}  // namespace gradsync::inline v0::kernel
