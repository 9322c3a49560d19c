// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "convert.hpp"

/// @file
/// Loops over arrays of float or double, for the passes of elementwise.hpp.

namespace gradsync::inline v0_2::kernel::detail {

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

struct Product {
    template <class A>
    GRADSYNC_ALWAYS_INLINE static A apply(A a, A x) {
        return a * x;
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

/// to[i] += from[i]. A is the accumulator type of `to`.
template <class A>
void add(void* to, DType to_type, const void* from, DType from_type, std::size_t count) {
    if (to_type == dtype_of<A> && from_type == dtype_of<A>)
        return dispatch<Add>(static_cast<A*>(to), static_cast<const A*>(from), count);
    for_blocks(count, [&](std::size_t first, std::size_t n) {
        alignas(64) A sums[elementwise_block];
        alignas(64) A summands[elementwise_block];
        void* const out = static_cast<std::byte*>(to) + first * size_of(to_type);
        convert(out, to_type, sums, dtype_of<A>, n);
        convert(static_cast<const std::byte*>(from) + first * size_of(from_type), from_type, summands, dtype_of<A>, n);
        dispatch<Add>(static_cast<A*>(sums), static_cast<const A*>(summands), n);
        convert(sums, dtype_of<A>, out, to_type, n);
    });
}

/// The number of partial sums. It is the same for every vector width, so that the bits do not depend on the processor.
inline constexpr std::size_t square_sums = 16;

/// Keeps the compiler from fusing the product in `value` with a sum that follows (see isa.hpp), and from reordering a
/// sum, as it may under `-ffast-math`.
template <class T>
GRADSYNC_ALWAYS_INLINE void round_now(T& value) {
    asm("" : "+m"(value));
}

inline double sum_in_order(ListView<const double> numbers) noexcept {
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
    GRADSYNC_ALWAYS_INLINE static double square(float x) { return square(static_cast<double>(x)); }
};

/// Finds whether an element has all bits of `mask` set.
struct AnyWith {
    template <class Bits>
    GRADSYNC_ALWAYS_INLINE static void run(const void* elements, std::size_t count, Bits mask, bool* found) {
        using Word [[gnu::may_alias]] = Bits;
        const auto* data = static_cast<const Word*>(elements);
        constexpr std::size_t block = 4096 / sizeof(Bits);
        for (std::size_t first = 0; first < count && !*found; first += block) {
            const std::size_t end = count - first < block ? count : first + block;
            Bits any = 0;
            for (std::size_t i = first; i < end; ++i) any |= static_cast<Bits>((data[i] & mask) == mask);
            *found = any != 0;
        }
    }
};

template <class Bits, Bits mask>
bool none_with(const void* elements, std::size_t count) {
    bool found = false;
    dispatch<AnyWith>(elements, count, mask, &found);
    return !found;
}

}  // namespace gradsync::inline v0_2::kernel::detail
