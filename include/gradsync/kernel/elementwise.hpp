// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/buffer_view.hpp"
#include "tables.hpp"

/// @file
/// Passes over one rank's own gradients in host memory: copy, add, scale, clamp, sum of squares. They take floating
/// types, compute in the accumulator's type, and round once.

namespace gradsync::inline v0_2::kernel {

namespace detail {

template <class Op>
void in_place(BufferView buffer, double operand, void (*Kernels::*of_double)(double*, std::size_t, double)) {
    if (buffer.dtype == DType::f32)
        return dispatch<InPlace<Op>>(static_cast<float*>(buffer.data), buffer.count, operand);
    const Kernels& kernels = kernels_of(buffer.dtype);
    if (buffer.dtype == DType::f64)
        return (kernels.*of_double)(static_cast<double*>(buffer.data), buffer.count, operand);
    for_blocks(buffer.count, [&](std::size_t first, std::size_t n) {
        alignas(64) float block[elementwise_block];
        void* const elements = buffer.subview(first, n).data;
        kernels.to_f32(elements, block, n);
        dispatch<InPlace<Op>>(static_cast<float*>(block), n, operand);
        kernels.from_f32(block, elements, n);
    });
}

}  // namespace detail

/// to[i] = from[i], converted if the types differ. Both have the same count.
/// They are the same memory, or do not overlap.
inline void copy(ConstBufferView from, BufferView to) {
    if (from.data != to.data) convert(from.data, from.dtype, to.data, to.dtype, to.count);
}

/// to[i] += from[i], in the accumulator's type of `to`. Both have the same count, and do not overlap.
inline void add(BufferView to, ConstBufferView from) {
    (to.dtype == DType::f64 ? kernels_of(DType::f64).add : detail::add<float>)(to.data, to.dtype, from.data, from.dtype,
                                                                               to.count);
}

/// data[i] *= factor.
inline void scale(BufferView buffer, double factor) {
    detail::in_place<detail::Product>(buffer, factor, &Kernels::scale);
}

/// data[i] = min(max(data[i], -limit), limit); a NaN stays.
inline void clamp(BufferView buffer, double limit) { detail::in_place<detail::Clamp>(buffer, limit, &Kernels::clamp); }

/// The sum of the squares, in double. The result does not depend on the processor.
inline double sum_of_squares(ConstBufferView buffer) {
    double sums[detail::square_sums] = {};
    const auto add_floats = [&](const float* data, std::size_t n) {
        dispatch<detail::SumOfSquares>(data, n, static_cast<double*>(sums));
    };
    if (buffer.dtype == DType::f64) {
        kernels_of(DType::f64).add_squares(static_cast<const double*>(buffer.data), buffer.count, sums);
    } else if (buffer.dtype == DType::f32) {
        add_floats(static_cast<const float*>(buffer.data), buffer.count);
    } else {
        detail::for_blocks(buffer.count, [&](std::size_t first, std::size_t n) {
            alignas(64) float block[detail::elementwise_block];
            kernels_of(buffer.dtype).to_f32(buffer.subview(first, n).data, block, n);
            add_floats(block, n);
        });
    }
    return detail::sum_in_order(sums);
}

/// True if no element is infinite or NaN. Stops soon after it finds one. Integers are finite.
inline bool all_finite(ConstBufferView buffer) {
    if (buffer.dtype == DType::f32) return detail::none_with<std::uint32_t, 0x7f80'0000>(buffer.data, buffer.count);
    return !is_floating(buffer.dtype) || kernels_of(buffer.dtype).all_finite(buffer.data, buffer.count);
}

}  // namespace gradsync::inline v0_2::kernel
