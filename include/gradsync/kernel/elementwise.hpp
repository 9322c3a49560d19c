#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "../core/buffer_view.hpp"
#include "convert.hpp"
#include "isa.hpp"

/// Passes over one rank's own gradients, in host memory: add, scale, clamp, sum of squares. Floating types;
/// everything is computed in the accumulator's type and rounded once.

namespace gradsync::inline v0::kernel {

namespace detail {

inline constexpr std::size_t elementwise_block = 256;

/// In-place passes: loads a block into the accumulator's type, applies Op to each element, stores it. The length of
/// a block is a constant for all but the last, so that the loops vectorise at -O2 already.
template <class Op>
struct InPlace {
    template <class T>
    GRADSYNC_ALWAYS_INLINE static void run(T* data, std::size_t count, double operand) {
        alignas(64) accumulator_t<T> block[elementwise_block];
        std::size_t first = 0;
        for (; first + elementwise_block <= count; first += elementwise_block) step(data + first, block, elementwise_block, operand);
        if (first < count) step(data + first, block, count - first, operand);
    }
    template <class T, class A>
    GRADSYNC_ALWAYS_INLINE static void step(T* data, A* __restrict block, std::size_t n, double operand) {
        load_block(data, block, n);
        for (std::size_t i = 0; i < n; ++i) block[i] = Op::apply(block[i], static_cast<A>(operand));
        store_block(block, data, n);
    }
};

struct Scale {
    template <class A>
    GRADSYNC_ALWAYS_INLINE static A apply(A x, A factor) { return x * factor; }
};
struct Clamp {  // a NaN stays
    template <class A>
    GRADSYNC_ALWAYS_INLINE static A apply(A x, A limit) {
        const A below = x > limit ? limit : x;
        return below < -limit ? -limit : below;
    }
};

struct Add {
    template <class T>
    GRADSYNC_ALWAYS_INLINE static void run(T* to, const accumulator_t<T>* from, std::size_t count) {
        alignas(64) accumulator_t<T> sum[elementwise_block];
        std::size_t first = 0;
        for (; first + elementwise_block <= count; first += elementwise_block)
            step(to + first, from + first, sum, elementwise_block);
        if (first < count) step(to + first, from + first, sum, count - first);
    }
    template <class T, class A>
    GRADSYNC_ALWAYS_INLINE static void step(T* to, const A* __restrict from, A* __restrict sum, std::size_t n) {
        load_block(to, sum, n);
        for (std::size_t i = 0; i < n; ++i) sum[i] += from[i];
        store_block(sum, to, n);
    }
};

struct SumOfSquares {
    /// Sixteen partial sums in double, whatever the vector width: the bits do not depend on the processor.
    template <class T>
    GRADSYNC_ALWAYS_INLINE static void run(const T* data, std::size_t count, double* result) {
        constexpr std::size_t lanes = 16;
        double sums[lanes] = {};
        std::size_t first = 0;
        for (; first + lanes <= count; first += lanes)
            for (std::size_t i = 0; i < lanes; ++i) {
                const double x = convert_element<double>(data[first + i]);
                sums[i] += x * x;
            }
        for (std::size_t i = 0; first + i < count; ++i) {
            const double x = convert_element<double>(data[first + i]);
            sums[i] += x * x;
        }
        double sum = 0;
        for (double s : sums) sum += s;
        *result = sum;
    }
};

/// Calls `use` with a pointer of the buffer's element type.
template <class View, class Use>
void with_elements(const View& view, Use use) {
    constexpr bool constant = std::is_same_v<View, ConstBufferView>;
    const auto call = [&]<class T>(T*) { use(static_cast<std::conditional_t<constant, const T, T>*>(view.data)); };
    switch (view.dtype) {
        case DType::f16: return call(static_cast<Float16*>(nullptr));
        case DType::bf16: return call(static_cast<BFloat16*>(nullptr));
        case DType::f64: return call(static_cast<double*>(nullptr));
        default: return call(static_cast<float*>(nullptr));
    }
}

}  // namespace detail

/// to[i] += from[i], in the accumulator's type of `to`; the two are of the same count and do not overlap.
inline void add(BufferView to, ConstBufferView from) {
    detail::with_elements(to, [&]<class T>(T* t) {
        using A = accumulator_t<T>;
        if (from.dtype == dtype_of<A>) return dispatch<detail::Add>(t, static_cast<const A*>(from.data), to.count);
        constexpr std::size_t block = 1024;  // converted where it stays in the cache
        alignas(64) A converted[block];
        for (std::size_t first = 0; first < to.count; first += block) {
            const std::size_t n = std::min(block, to.count - first);
            convert(from.subview(first, n).data, from.dtype, converted, dtype_of<A>, n);
            dispatch<detail::Add>(t + first, static_cast<const A*>(converted), n);
        }
    });
}

/// data[i] *= factor.
inline void scale(BufferView buffer, double factor) {
    detail::with_elements(buffer, [&](auto* data) { dispatch<detail::InPlace<detail::Scale>>(data, buffer.count, factor); });
}

/// data[i] = min(max(data[i], -limit), limit).
inline void clamp(BufferView buffer, double limit) {
    detail::with_elements(buffer, [&](auto* data) { dispatch<detail::InPlace<detail::Clamp>>(data, buffer.count, limit); });
}

/// The sum of the squares, in double.
inline double sum_of_squares(ConstBufferView buffer) {
    double result = 0;
    detail::with_elements(buffer, [&](auto* data) { dispatch<detail::SumOfSquares>(data, buffer.count, &result); });
    return result;
}

}  // namespace gradsync::inline v0::kernel
