// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../core/dtype.hpp"
#include "float8.hpp"
#include "isa.hpp"

/// Bulk conversion between floating types, in host memory.
///
/// Every result has the same bits as the scalar conversions of `StorageFloat`, for every input:
/// round to nearest, ties to even, overflow to infinity (8-bit types: to the largest number), NaN quiet with its upper
/// payload bits, denormals kept, even if the thread runs with flush-to-zero. From `double`, types of 16 and 8 bits
/// are rounded once (never to a `float` in between). The 8-bit types go through blocks of f32.
///
/// The loops work on blocks of a constant length, because GCC vectorises nothing else at -O2. They choose by masks
/// instead of branches, because a branch around a floating-point operation keeps GCC from vectorising it.

namespace gradsync::inline v0_2::kernel {

/// The type in which elements of type T are summed and scaled: `float` for types of 16 and 8 bits, T itself otherwise.
template <Element T>
using accumulator_t = std::conditional_t<is_low_precision(dtype_of<T>), float, T>;

namespace detail {

/// A vector type with `bytes` bytes of numbers. Pass it by reference only: the convention for passing it by value depends on the instruction
/// set.
template <class T, std::size_t bytes>
struct Pack {
    using type [[gnu::vector_size(bytes)]] = T;
};

/// The layout of a floating type: its mantissa bits and exponent bias.
template <class T>
struct Layout {
    static constexpr int mantissa = T::mantissa, bias = T::bias;
};

/// The layout of a type to compute in, a number or a pack of numbers. `Unsigned` and `Signed` are integers of a number's size; `Bits` and
/// `SignedBits` hold the bits of the whole value.
template <class N, class U, class S, int mantissa_bits, int exponent_bias>
struct NumberLayout {
    using Number = N;
    using Unsigned = U;
    using Signed = S;
    using Value = N;
    using Bits = U;
    using SignedBits = S;
    static constexpr int mantissa = mantissa_bits, bias = exponent_bias;
};
template <>
struct Layout<float> : NumberLayout<float, std::uint32_t, std::int32_t, 23, 127> {};
template <>
struct Layout<double> : NumberLayout<double, std::uint64_t, std::int64_t, 52, 1023> {};
template <class T, std::size_t bytes>
struct Layout<Pack<T, bytes>> : Layout<T> {
    using Value = typename Pack<T, bytes>::type;
    using Bits = typename Pack<typename Layout<T>::Unsigned, bytes>::type;
    using SignedBits = typename Pack<typename Layout<T>::Signed, bytes>::type;
};

/// Sets `result` to `yes` if `condition` holds, without a branch; in packs, element by element.
template <class Condition, class Bits>
GRADSYNC_ALWAYS_INLINE void replace_where(const Condition& condition, const Bits& yes, Bits& result) noexcept {
    if constexpr (std::is_same_v<Condition, bool>) result ^= (yes ^ result) & (Bits{0} - static_cast<Bits>(condition));
    else result = condition ? yes : result;
}

/// Sets `result` to x if x is a NaN. Comparisons have done so already, except under `-ffast-math`, which lets compilers assume that there
/// are no NaNs.
template <class A>
GRADSYNC_ALWAYS_INLINE void keep_nan([[maybe_unused]] A x, [[maybe_unused]] A& result) noexcept {
#if __FINITE_MATH_ONLY__
    if constexpr (std::is_floating_point_v<A>) {
        using U = typename Layout<A>::Unsigned;
        using S = typename Layout<A>::Signed;
        constexpr S infinity = S(2 * Layout<A>::bias + 1) << Layout<A>::mantissa;
        const U bits = __builtin_bit_cast(U, x);
        U chosen = __builtin_bit_cast(U, result);
        replace_where(S(bits << 1 >> 1) > infinity, bits, chosen);
        result = __builtin_bit_cast(A, chosen);
    }
#endif
}

/// Rounds `value` once to the 16-bit type To, whose bits become the lower bits of `half`. Like `widen`, it works on single numbers and on
/// packs; hence the reference parameters, and __builtin_bit_cast instead of the function std::bit_cast.
template <class To, class From>
GRADSYNC_ALWAYS_INLINE void narrow(const typename Layout<From>::Value& value, typename Layout<From>::Bits& half) noexcept {
    using In = Layout<From>;
    using Out = Layout<To>;
    using Value = typename In::Value;
    using Bits = typename In::Bits;
    using SignedBits = typename In::SignedBits;
    using U = typename In::Unsigned;
    using S = typename In::Signed;  // magnitudes are compared as signed numbers: SSE2 has no other comparison
    constexpr int drop = In::mantissa - Out::mantissa;
    constexpr U sign_bit = U{1} << (sizeof(U) * 8 - 1);
    constexpr S infinity = S(2 * In::bias + 1) << In::mantissa;
    constexpr U rebias = U(In::bias - Out::bias) << In::mantissa;
    constexpr U just_below_half = (U{1} << (drop - 1)) - 1;
    constexpr U half_infinity = U(2 * Out::bias + 1) << Out::mantissa;
    constexpr U half_quiet = half_infinity | (U{1} << (Out::mantissa - 1));

    const Bits bits = __builtin_bit_cast(Bits, value);
    const Bits magnitude = bits & ~sign_bit;
    if constexpr (rebias == 0) {  // the same exponents: the sign can stay in place
        half = (bits + just_below_half + ((bits >> drop) & 1)) >> drop;
        replace_where(SignedBits(magnitude) > infinity, Bits((bits >> drop) | half_quiet), half);
    } else {
        half = (magnitude - rebias + just_below_half + ((magnitude >> drop) & 1)) >> drop;
        // Below the least normal number of To, the adder rounds: the power of two that is added has To's least denormal
        // as its last place. No operand that matters and no result is denormal, so flush-to-zero changes nothing.
        constexpr S min_normal = S(rebias + (U{1} << In::mantissa));
        constexpr U magic = U(In::bias + 1 - Out::bias - Out::mantissa + In::mantissa) << In::mantissa;
        const Value rounded = __builtin_bit_cast(Value, magnitude) + __builtin_bit_cast(typename In::Number, magic);
        replace_where(SignedBits(magnitude) < min_normal, Bits(__builtin_bit_cast(Bits, rounded) - magic), half);
        const SignedBits unlimited = SignedBits(half), limit = SignedBits{} + S(half_infinity);
        half = Bits(unlimited < limit ? unlimited : limit);  // too large: infinity
        const Bits payload = (magnitude >> drop) & ((U{1} << Out::mantissa) - 1);
        replace_where(SignedBits(magnitude) > infinity, Bits(payload | half_quiet), half);
        half |= (bits & sign_bit) >> (sizeof(U) * 8 - 16);
    }
}

/// Widens numbers of the 16-bit type From, which are in the lower bits of `half`. Exact.
template <class From, class To>
GRADSYNC_ALWAYS_INLINE void widen(const typename Layout<To>::Bits& half, typename Layout<To>::Value& value) noexcept {
    using Value = typename Layout<To>::Value;
    using Bits = typename Layout<To>::Bits;
    using SignedBits = typename Layout<To>::SignedBits;
    if constexpr (std::is_same_v<From, BFloat16>) {
        value = __builtin_bit_cast(Value, half << 16);
    } else {
        constexpr std::uint32_t rebias = (127u - 15u) << 23;
        const Bits magnitude = half & 0x7fffu;
        Bits bits = (magnitude << 13) + rebias;
        replace_where(SignedBits(magnitude) > 0x7bff, Bits(bits + rebias), bits);  // infinity or NaN: exponent 255
        // A denormal becomes the mantissa of 2^-14 (1 + m), a normal number. Subtracting 2^-14 from it is exact.
        const Value denormal = __builtin_bit_cast(Value, bits + (1u << 23)) - 0x1p-14f;
        replace_where(SignedBits(magnitude) < 0x400, __builtin_bit_cast(Bits, denormal), bits);
        bits |= (half & 0x8000u) << 16;
        value = __builtin_bit_cast(Value, bits);
    }
}

template <class To, class From>
GRADSYNC_ALWAYS_INLINE To convert_element(From value) noexcept {
    if constexpr (std::is_same_v<To, From>) {
        return value;
    } else if constexpr (is_low_precision(dtype_of<From>)) {
        float number;
        widen<From, float>(value.bits(), number);
        return convert_element<To>(number);
    } else if constexpr (is_low_precision(dtype_of<To>)) {
        typename Layout<From>::Bits half;
        narrow<To, From>(value, half);
        return To::from_bits(static_cast<std::uint16_t>(half));
    } else {
        return static_cast<To>(value);
    }
}

/// Converts `n` elements inside the dispatched loop of a kernel. It is vectorised if `n` is a constant at the call. Not for the 8-bit types.
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

template <class = void>
void convert(const void* from, DType from_type, void* to, DType to_type, std::size_t n) noexcept;

/// Converts `n` elements from one floating type to another, with the widest vectors of the processor.
/// The ranges must not overlap. They need no alignment beyond that of their elements.
template <Element From, Element To>
    requires(is_floating(dtype_of<From>) && is_floating(dtype_of<To>))
void convert(const From* from, To* to, std::size_t n) noexcept {
    if constexpr (std::is_same_v<From, To>) {
        if (n != 0) std::memcpy(to, from, n * sizeof(From));
    } else if constexpr (is_float8(dtype_of<From>) || is_float8(dtype_of<To>)) {
        convert(from, dtype_of<From>, to, dtype_of<To>, n);
    } else {
        dispatch<detail::Convert>(from, to, n);
    }
}

namespace detail {

template <class From>
void convert_from(const From* from, void* to, DType to_type, std::size_t n) noexcept {
    switch (to_type) {
        case DType::f16: return convert(from, static_cast<Float16*>(to), n);
        case DType::bf16: return convert(from, static_cast<BFloat16*>(to), n);
        case DType::f64: return convert(from, static_cast<double*>(to), n);
        default: return convert(from, static_cast<float*>(to), n);
    }
}

template <class = void>
void convert_float8(const void* from, DType from_type, void* to, DType to_type, std::size_t n) noexcept {
    alignas(64) float block[float8_block];
    for (std::size_t first = 0; first < n; first += float8_block) {
        const std::size_t size = n - first < float8_block ? n - first : float8_block;
        const auto* const in = static_cast<const std::byte*>(from) + first * size_of(from_type);
        auto* const out = static_cast<std::byte*>(to) + first * size_of(to_type);
        // A source or destination in f32 needs no copy.
        float* const widened = to_type == DType::f32 ? reinterpret_cast<float*>(out) : block;
        const float* values = from_type == DType::f32 ? reinterpret_cast<const float*>(in) : widened;
        if (is_float8(from_type)) widen_float8(in, from_type, widened, size);
        else if (from_type == DType::f64) round_to_odd(reinterpret_cast<const double*>(in), block, size);
        else if (from_type != DType::f32) kernel::convert(in, from_type, block, DType::f32, size);
        if (is_float8(to_type)) round_float8(values, size, out, to_type);
        else if (to_type != DType::f32) kernel::convert(block, DType::f32, out, to_type, size);
    }
}

}  // namespace detail

/// The same for types known at run time. Both must be floating types.
template <class>
void convert(const void* from, DType from_type, void* to, DType to_type, std::size_t n) noexcept {
    assert(is_floating(from_type) && is_floating(to_type));
    if (is_float8(from_type) || is_float8(to_type)) {
        if (from_type != to_type) detail::convert_float8(from, from_type, to, to_type, n);
        else if (n != 0) std::memcpy(to, from, n);
        return;
    }
    switch (from_type) {
        case DType::f16: return detail::convert_from(static_cast<const Float16*>(from), to, to_type, n);
        case DType::bf16: return detail::convert_from(static_cast<const BFloat16*>(from), to, to_type, n);
        case DType::f64: return detail::convert_from(static_cast<const double*>(from), to, to_type, n);
        default: return detail::convert_from(static_cast<const float*>(from), to, to_type, n);
    }
}

#ifdef GRADSYNC_EXTERN_KERNELS  // see instantiations.hpp
extern template void convert<void>(const void*, DType, void*, DType, std::size_t) noexcept;
#endif

}  // namespace gradsync::inline v0_2::kernel
