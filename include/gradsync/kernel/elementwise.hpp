// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>

#include "../core/buffer_view.hpp"
#include "convert.hpp"
#include "isa.hpp"

/// Passes over one rank's own gradients in host memory: copy, add, scale, clamp, sum of squares. They take floating types, compute in the
/// accumulator's type, and round once.
///
/// The loops exist for float and double only. Other types are converted block by block; a block stays in the cache.

namespace gradsync::inline v0_2::kernel {

namespace detail {

/// The number of elements that are converted at a time; a multiple of all constant loop lengths below.
inline constexpr std::size_t elementwise_block = 1024;

/// Calls `pass(first, n)` for one block after another.
template <class Pass>
void for_blocks(std::size_t count, Pass pass) {
    for (std::size_t first = 0; first < count; first += elementwise_block)
        pass(first, count - first < elementwise_block ? count - first : elementwise_block);
}

/// Applies Op to all elements. The inner loop has a constant length, so that it is vectorised at -O2.
template <class Op>
struct InPlace {
    template <class A>
    GRADSYNC_ALWAYS_INLINE static void run(A* data, std::size_t count, double operand) {
        constexpr std::size_t length = 64;
        const A value = static_cast<A>(operand);
        std::size_t first = 0;
        for (; first + length <= count; first += length)
            for (std::size_t i = 0; i < length; ++i) data[first + i] = Op::apply(data[first + i], value);
        for (; first < count; ++first) data[first] = Op::apply(data[first], value);
    }
};

struct Scale {
    template <class A>
    GRADSYNC_ALWAYS_INLINE static A apply(A x, A factor) {
        return x * factor;
    }
};
struct Clamp {  // a NaN stays
    template <class A>
    GRADSYNC_ALWAYS_INLINE static A apply(A x, A limit) {
        const A below = x > limit ? limit : x;
        A within = below < -limit ? -limit : below;
        keep_nan(x, within);
        return within;
    }
};

template <class Op>
void in_place(BufferView buffer, double operand) {
    if (buffer.dtype == DType::f64) return dispatch<InPlace<Op>>(static_cast<double*>(buffer.data), buffer.count, operand);
    if (buffer.dtype == DType::f32) return dispatch<InPlace<Op>>(static_cast<float*>(buffer.data), buffer.count, operand);
    for_blocks(buffer.count, [&](std::size_t first, std::size_t n) {
        alignas(64) float block[elementwise_block];
        const BufferView elements = buffer.subview(first, n);
        convert(elements.data, buffer.dtype, block, DType::f32, n);
        dispatch<InPlace<Op>>(block, n, operand);
        convert(block, DType::f32, elements.data, buffer.dtype, n);
    });
}

struct Add {
    template <class A>
    GRADSYNC_ALWAYS_INLINE static void run(A* to, const A* from, std::size_t count) {
        constexpr std::size_t length = 64;
        std::size_t first = 0;
        for (; first + length <= count; first += length) add_constant(to + first, from + first, length);
        for (; first < count; ++first) to[first] += from[first];
    }
    template <class A>
    GRADSYNC_ALWAYS_INLINE static void add_constant(A* __restrict to, const A* __restrict from, std::size_t length) {
        for (std::size_t i = 0; i < length; ++i) to[i] += from[i];
    }
};

/// A is the accumulator type of `to`.
template <class A>
void add(BufferView to, ConstBufferView from) {
    if (to.dtype == dtype_of<A> && from.dtype == dtype_of<A>)
        return dispatch<Add>(static_cast<A*>(to.data), static_cast<const A*>(from.data), to.count);
    for_blocks(to.count, [&](std::size_t first, std::size_t n) {
        alignas(64) A sums[elementwise_block];
        alignas(64) A summands[elementwise_block];
        const BufferView out = to.subview(first, n);
        const ConstBufferView in = from.subview(first, n);
        convert(out.data, to.dtype, sums, dtype_of<A>, n);
        convert(in.data, from.dtype, summands, dtype_of<A>, n);
        dispatch<Add>(static_cast<A*>(sums), static_cast<const A*>(summands), n);
        convert(sums, dtype_of<A>, out.data, to.dtype, n);
    });
}

/// The number of partial sums. It is the same for every vector width, so that the bits do not depend on the processor.
inline constexpr std::size_t square_sums = 16;

/// Keeps the compiler from fusing the product in `value` with a sum that follows (see isa.hpp), and from reordering a sum, as it may under
/// `-ffast-math`.
template <class T>
GRADSYNC_ALWAYS_INLINE void round_now(T& value) {
    asm("" : "+m"(value));
}

inline double sum_in_order(std::span<const double> numbers) noexcept {
    double sum = 0;
    for (const double number : numbers) {
        sum += number;
        round_now(sum);
    }
    return sum;
}

/// Adds the squares of the elements to the partial sums: element i to sum i % square_sums.
struct SumOfSquares {
    template <class A>
    GRADSYNC_ALWAYS_INLINE static void run(const A* data, std::size_t count, double* result) {
        double sums[square_sums];
        for (std::size_t k = 0; k < square_sums; ++k) sums[k] = result[k];
        std::size_t first = 0;
        for (; first + square_sums <= count; first += square_sums) {
            double squares[square_sums];
            for (std::size_t k = 0; k < square_sums; ++k) squares[k] = square(data[first + k]);
            if constexpr (std::is_same_v<A, double>) round_now(squares);  // a float's square is exact
            for (std::size_t k = 0; k < square_sums; ++k) sums[k] += squares[k];
        }
        for (std::size_t k = 0; first + k < count; ++k) {
            double squared = square(data[first + k]);
            if constexpr (std::is_same_v<A, double>) round_now(squared);
            sums[k] += squared;
        }
        for (std::size_t k = 0; k < square_sums; ++k) result[k] = sums[k];
    }
    GRADSYNC_ALWAYS_INLINE static double square(double x) { return x * x; }
};

}  // namespace detail

/// to[i] = from[i], converted if the types differ. Both have the same count. They are the same memory, or do not overlap.
template <class = void>
void copy(ConstBufferView from, BufferView to) {
    if (from.data == to.data || to.count == 0) return;
    if (from.dtype != to.dtype) convert(from.data, from.dtype, to.data, to.dtype, to.count);
    else std::memcpy(to.data, from.data, to.bytes());
}

/// to[i] += from[i], in the accumulator's type of `to`. Both have the same count, and do not overlap.
template <class = void>
void add(BufferView to, ConstBufferView from) {
    if (to.dtype == DType::f64) detail::add<double>(to, from);
    else detail::add<float>(to, from);
}

/// data[i] *= factor.
template <class = void>
void scale(BufferView buffer, double factor) {
    detail::in_place<detail::Scale>(buffer, factor);
}

/// data[i] = min(max(data[i], -limit), limit); a NaN stays.
template <class = void>
void clamp(BufferView buffer, double limit) {
    detail::in_place<detail::Clamp>(buffer, limit);
}

/// The sum of the squares, in double. The result does not depend on the processor.
template <class = void>
double sum_of_squares(ConstBufferView buffer) {
    using detail::SumOfSquares;
    double sums[detail::square_sums] = {};
    if (buffer.dtype == DType::f64) dispatch<SumOfSquares>(static_cast<const double*>(buffer.data), buffer.count, sums);
    else if (buffer.dtype == DType::f32) dispatch<SumOfSquares>(static_cast<const float*>(buffer.data), buffer.count, sums);
    else
        detail::for_blocks(buffer.count, [&](std::size_t first, std::size_t n) {
            alignas(64) float block[detail::elementwise_block];
            convert(buffer.subview(first, n).data, buffer.dtype, block, DType::f32, n);
            dispatch<SumOfSquares>(static_cast<const float*>(block), n, sums);
        });
    return detail::sum_in_order(sums);
}

#ifdef GRADSYNC_EXTERN_KERNELS  // see instantiations.hpp
extern template void copy<void>(ConstBufferView, BufferView);
extern template void add<void>(BufferView, ConstBufferView);
extern template void scale<void>(BufferView, double);
extern template void clamp<void>(BufferView, double);
extern template double sum_of_squares<void>(ConstBufferView);
#endif

}  // namespace gradsync::inline v0_2::kernel
