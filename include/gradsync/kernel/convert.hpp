// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstring>

#include "kernels.hpp"

/// Bulk conversion between floating types, in host memory.
///
/// Every result has the same bits as the scalar conversions of `StorageFloat`, for every input:
/// round to nearest, ties to even, overflow to infinity (8-bit types: to the largest number), NaN quiet with its upper
/// payload bits, denormals kept, even if the thread runs with flush-to-zero. From `double`, types of 16 and 8 bits
/// are rounded once. There are loops to f32 and from f32 only; other pairs go through blocks of f32.
///
/// The loops work on blocks of a constant length, because GCC vectorises nothing else at -O2. They choose by masks
/// instead of branches, because a branch around a floating-point operation keeps GCC from vectorising it.

namespace gradsync::inline v0_2::kernel {

/// The type in which elements of type T are summed and scaled: `float` for types of 16 and 8 bits, T itself otherwise.
template <Element T>
using accumulator_t = std::conditional_t<is_low_precision(dtype_of<T>), float, T>;

namespace detail {

/// Sets `result` to x if x is a NaN. Comparisons have done so already, except under `-ffast-math`, which lets compilers assume that there
/// are no NaNs.
template <class A>
GRADSYNC_ALWAYS_INLINE void keep_nan([[maybe_unused]] A x, [[maybe_unused]] A& result) noexcept {
#if __FINITE_MATH_ONLY__
    if constexpr (std::is_floating_point_v<A>) {
        using U = std::conditional_t<sizeof(A) == 4, std::uint32_t, std::uint64_t>;
        constexpr U infinity = sizeof(A) == 4 ? U{0x7f80'0000u} : static_cast<U>(0x7ff0'0000'0000'0000u);
        const U bits = __builtin_bit_cast(U, x);
        result = __builtin_bit_cast(A, bits << 1 > infinity << 1 ? bits : __builtin_bit_cast(U, result));
    }
#endif
}

/// Vectorised if `n` is a constant at the call.
template <class To, class From>
GRADSYNC_ALWAYS_INLINE void convert_block(const From* __restrict from, To* __restrict to, std::size_t n) noexcept {
    for (std::size_t i = 0; i < n; ++i) to[i] = static_cast<To>(from[i]);
}

/// Between f32 and another floating type.
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

template <class T>
void to_f32(const void* from, float* to, std::size_t n) {
    dispatch<Convert>(static_cast<const T*>(from), to, n);
}
template <class T>
void from_f32(const float* from, void* to, std::size_t n) {
    dispatch<Convert>(from, static_cast<T*>(to), n);
}

/// Converts `n` elements of f64. An inexact result gets an odd last bit, so that a second rounding, to fewer bits, gives what a single one
/// would. By integers, because a thread may flush denormals to zero.
inline void round_to_odd(const void* from, float* to, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        const auto bits = __builtin_bit_cast(std::uint64_t, static_cast<const double*>(from)[i]);
        const std::uint64_t magnitude = bits & 0x7fff'ffff'ffff'ffffu, exponent = magnitude >> 52;
        std::uint64_t result = (magnitude - (std::uint64_t{1023 - 127} << 52)) >> 29;
        result |= (magnitude & 0x1fff'ffffu) != 0;
        if (exponent < 1023 - 149) {  // less than every f32
            result = magnitude != 0;
        } else if (exponent < 1023 - 126) {  // a denormal
            const std::uint64_t whole = (magnitude & 0xf'ffff'ffff'ffffu) | std::uint64_t{1} << 52, shift = 1023 - 126 + 29 - exponent;
            result = whole >> shift | ((whole & ((std::uint64_t{1} << shift) - 1)) != 0);
        }
        if (exponent >= 1023 + 128) result = 0x7f80'0000u;
        if (magnitude > std::uint64_t{0x7ff} << 52) result = 0x7fc0'0000u | (magnitude >> 29 & 0x7f'ffffu);
        to[i] = __builtin_bit_cast(float, static_cast<std::uint32_t>(result | (bits >> 63 << 31)));
    }
}

/// The number of elements that go through f32 at a time; a multiple of all constant lengths of loops. A block stays in the cache.
inline constexpr std::size_t elementwise_block = 1024;

/// Calls `pass(first, n)` for one block after another.
template <class Pass>
void for_blocks(std::size_t count, Pass pass) {
    for (std::size_t first = 0; first < count; first += elementwise_block)
        pass(first, count - first < elementwise_block ? count - first : elementwise_block);
}

}  // namespace detail

/// Converts `n` elements from one floating type to another, with the widest vectors of the processor. The ranges must not overlap. They
/// need no alignment beyond that of their elements.
[[gnu::noinline]] inline void convert(const void* from, DType from_type, void* to, DType to_type, std::size_t n) {
    if (n == 0) return;
    if (from_type == to_type) {
        std::memcpy(to, from, n * size_of(to_type));
    } else if (to_type == DType::f32) {
        kernels_of(from_type).to_f32(from, static_cast<float*>(to), n);
    } else if (from_type == DType::f32) {
        kernels_of(to_type).from_f32(static_cast<const float*>(from), to, n);
    } else {
        const Kernels& in = kernels_of(from_type);
        const Kernels& out = kernels_of(to_type);
        detail::for_blocks(n, [&](std::size_t first, std::size_t size) {
            alignas(64) float block[detail::elementwise_block];
            (in.to_f32_odd != nullptr ? in.to_f32_odd : in.to_f32)(static_cast<const std::byte*>(from) + first * size_of(from_type), block,
                                                                   size);
            out.from_f32(block, static_cast<std::byte*>(to) + first * size_of(to_type), size);
        });
    }
}

}  // namespace gradsync::inline v0_2::kernel
