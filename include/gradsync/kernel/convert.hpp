// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstring>

#include "../core/error.hpp"
#include "../core/kernel_registry.hpp"
#include "../core/list.hpp"
#include "../core/math.hpp"
#include "../core/reduce_op.hpp"
#include "isa.hpp"

/// @file
/// Bulk conversion between floating types, in host memory.
///
/// Every result has the same bits as the scalar conversions of `StorageFloat`, for every input:
/// rounded to nearest, ties to even; overflow becomes infinity (in 8-bit types the largest number); a NaN stays quiet,
/// with its upper payload bits; denormals are kept, even if the thread runs with flush-to-zero. From `double`, types
/// of 16 and 8 bits are rounded once. There are loops to f32 and from f32 only; other pairs go through blocks of f32.
///
/// The loops work on blocks of a constant length, because GCC vectorises nothing else at -O2. They choose by masks
/// instead of branches, because a branch around a floating-point operation keeps GCC from vectorising it.

namespace gradsync::inline v0_2::kernel {

/// One fused pass: combines the inputs, the leaves of a tree (core/math.hpp), and writes the result to every output.
/// Ranks that share an address space, or a window of it, reduce with it.
///
/// `inputs[i]` and `outputs[j]` point to `count` elements of `dtype` each. An output is one of the inputs, or overlaps
/// none of them. Input i is multiplied by `scales[i]` first (empty: by 1), and the result by `factor` last; both are
/// for floating types. The reduction computes in the accumulator's type (`accumulator_of`) and rounds once. The bits of
/// an element depend only on the inputs, the factors and the tree.
struct Reduction {
    ListView<const void* const> inputs;
    ListView<const double> scales;
    ListView<void* const> outputs;
    std::size_t count = 0;
    DType dtype = DType::f32;
    ReduceOp op = ReduceOp::sum;
    double factor = 1;
    /// If inputs are nodes of a larger tree: the number of times that the last two open sums are added after input i.
    /// One sum is left at the end.
    ListView<const std::uint8_t> sums = {};
};

/// The loops over elements of one floating type, compiled for every instruction set. All other operations on 16- and
/// 8-bit types go block by block through f32. The loops of f32 and of integers are called directly.
///
/// A program compiles the tables of the types that it names: where a C++ type becomes a DType, `register_kernels`
/// (core/kernel_registry.hpp) stores its table for `kernels_of`.
struct Kernels {
    void (*to_f32)(const void* from, float* to, std::size_t n) = nullptr;
    void (*from_f32)(const float* from, void* to, std::size_t n) = nullptr;
    bool (*all_finite)(const void* elements, std::size_t n) = nullptr;
    void (*sum)(const Reduction* r) = nullptr;  ///< the hot path: sums and means of unscaled inputs; null: 8-bit types
    // f64 only. The results of `to_f32_odd` are to be rounded again, see `round_to_odd`.
    void (*to_f32_odd)(const void* from, float* to, std::size_t n) = nullptr;
    void (*reduce)(const Reduction* r) = nullptr;
    void (*scale)(double* data, std::size_t n, double factor) = nullptr;
    void (*clamp)(double* data, std::size_t n, double limit) = nullptr;
    void (*add)(void* to, DType to_type, const void* from, DType from_type, std::size_t n) = nullptr;
    void (*add_squares)(const double* data, std::size_t n, double* sums) = nullptr;
};

namespace detail {

[[noreturn, gnu::cold, gnu::noinline]] inline void no_kernels(DType type) {
    gradsync::detail::raise(Errc::invalid_argument, "no code for elements of ", type,
                            " is in this program: give their type where a view of them is made, as in "
                            "gs::BufferView{pointer, count, gs::DType::",
                            type, "}, not afterwards in its member dtype");
}

}  // namespace detail

/// The table of a floating type other than f32. Throws Error(invalid_argument) if nothing has registered it.
inline const Kernels& kernels_of(DType type) {
    const Kernels* const table = detail::tables[static_cast<std::size_t>(type)].load(std::memory_order_relaxed);
    if (table == nullptr) detail::no_kernels(type);
    return *table;
}

/// Throws as `kernels_of` does if elements of any type cannot be reduced.
inline void require_kernels(DType type) {
    if (is_floating(type) && type != DType::f32) kernels_of(type);
}

/// The type in which elements of type T are summed and scaled: `float` for types of 16 and 8 bits, T itself otherwise.
template <Element T>
using accumulator_t = std::conditional_t<is_low_precision(dtype_of<T>), float, T>;

namespace detail {

/// Sets `result` to x if x is a NaN. Comparisons have done so already, except under `-ffast-math`, which lets compilers
/// assume that there are no NaNs.
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

/// Converts `n` elements of f64. An inexact result gets an odd last bit, so that a second rounding, to fewer bits,
/// gives what a single one would. It uses integers, because a thread may flush denormals to zero.
inline void round_to_odd(const void* from, float* to, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        const auto bits = __builtin_bit_cast(std::uint64_t, static_cast<const double*>(from)[i]);
        const std::uint64_t magnitude = bits & 0x7fff'ffff'ffff'ffffu, exponent = magnitude >> 52;
        std::uint64_t result = (magnitude - (std::uint64_t{1023 - 127} << 52)) >> 29;
        result |= (magnitude & 0x1fff'ffffu) != 0;
        if (exponent < 1023 - 149) {  // less than every f32
            result = magnitude != 0;
        } else if (exponent < 1023 - 126) {  // a denormal
            const std::uint64_t whole = (magnitude & 0xf'ffff'ffff'ffffu) | std::uint64_t{1} << 52,
                                shift = 1023 - 126 + 29 - exponent;
            result = whole >> shift | ((whole & ((std::uint64_t{1} << shift) - 1)) != 0);
        }
        if (exponent >= 1023 + 128) result = 0x7f80'0000u;
        if (magnitude > std::uint64_t{0x7ff} << 52) result = 0x7fc0'0000u | (magnitude >> 29 & 0x7f'ffffu);
        to[i] = __builtin_bit_cast(float, static_cast<std::uint32_t>(result | (bits >> 63 << 31)));
    }
}

/// The number of elements that go through f32 at a time; a multiple of all constant lengths of loops.
/// A block stays in the cache.
inline constexpr std::size_t elementwise_block = 1024;

/// Calls `pass(first, n)` for one block after another.
template <class Pass>
void for_blocks(std::size_t count, Pass pass) {
    for (std::size_t first = 0; first < count; first += elementwise_block)
        pass(first, count - first < elementwise_block ? count - first : elementwise_block);
}

}  // namespace detail

/// Converts `n` elements from one floating type to another, with the widest vectors of the processor. The ranges must
/// not overlap. They need no alignment beyond that of their elements.
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
            (in.to_f32_odd != nullptr ? in.to_f32_odd : in.to_f32)(
                static_cast<const std::byte*>(from) + first * size_of(from_type), block, size);
            out.from_f32(block, static_cast<std::byte*>(to) + first * size_of(to_type), size);
        });
    }
}

}  // namespace gradsync::inline v0_2::kernel
