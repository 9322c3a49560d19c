// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <ATen/core/Tensor.h>
#if __has_include(<c10/util/Float8_e4m3fn.h>) && __has_include(<c10/util/Float8_e5m2.h>)  // libtorch 2.1
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#define GRADSYNC_TORCH_FLOAT8 1
#else
#define GRADSYNC_TORCH_FLOAT8 0
#endif

#include "../core/parameter.hpp"
#include "../kernel/tables.hpp"

/// @file
/// libtorch tensors as buffers, and as parameters with their `.grad()`. The dtype is read when a view is made.

namespace gradsync::inline v0_2 {

/// A tensor may have any strides without gaps (contiguous, channels_last, a transposed matrix).
/// All ranks must have the same ones.
template <>
struct buffer_traits<at::Tensor> {
    /// Throws Error(invalid_argument) for a tensor that is undefined, not dense, of an unsupported dtype, or on an
    /// unsupported device.
    static BufferView view(const at::Tensor& t) {
        const BufferView memory = bytes(t);
        return {memory.data, static_cast<std::size_t>(t.numel()), dtype(t), memory.space};
    }
    /// The memory of a tensor of any dtype, for broadcasts. Throws as `view` does.
    static BufferView bytes(const at::Tensor& t) {
        if (!t.defined())
            detail::raise(Errc::invalid_argument,
                          "an undefined tensor has no memory: give it some, such as with torch::zeros_like");
        if (t.layout() != at::kStrided)
            detail::raise(Errc::invalid_argument, "a tensor of ", describe(t),
                          " is sparse: make it dense (an embedding: sparse(false))");
        if (!t.unsafeGetTensorImpl()->is_non_overlapping_and_dense())
            detail::raise(Errc::invalid_argument, "a tensor of ", describe(t), " is not contiguous: ",
                          "it is a part of another tensor, or expanded; pass the whole tensor, or .contiguous()");
        return {t.data_ptr(), t.nbytes(), DType::u8, space_of(t)};
    }

    static at::IntArrayRef shape(const at::Tensor& t) { return t.sizes(); }
    static bool row_major(const at::Tensor& t) { return t.is_contiguous(); }

private:
    static DType dtype(const at::Tensor& t) {
        switch (t.scalar_type()) {
            case at::kChar: return DType::i8;
            case at::kByte: return DType::u8;
            case at::kInt: return DType::i32;
            case at::kLong: return DType::i64;
            case at::kHalf: return DType::f16;
            case at::kBFloat16: return DType::bf16;
            case at::kFloat: return DType::f32;
            case at::kDouble: return DType::f64;
#if GRADSYNC_TORCH_FLOAT8
            case at::kFloat8_e4m3fn: return DType::f8e4m3;
            case at::kFloat8_e5m2: return DType::f8e5m2;
#endif
            default:
                detail::raise(Errc::invalid_argument, "a tensor of ", describe(t),
                              " cannot be synchronised: use Float, Double, Half, BFloat16, ",
                              GRADSYNC_TORCH_FLOAT8 ? "Float8_e4m3fn, Float8_e5m2, " : "", "Char, Byte, Int or Long");
        }
    }

    static MemorySpace space_of(const at::Tensor& t) {
        if (t.is_cpu()) return MemorySpace::host;
        if (t.is_cuda()) return MemorySpace::device;
        detail::raise(Errc::invalid_argument, "a tensor of ", describe(t),
                      " is on a device that is not supported: use the CPU or CUDA");
    }

    static std::string describe(const at::Tensor& t) {
        return detail::text(c10::toString(t.scalar_type()), " [", detail::joined(t.sizes()), "] on ", t.device().str());
    }
};

/// A parameter with the gradient that autograd leaves in it. If there is none yet, let gradients live in the buckets
/// (GradientStorage::in_buckets), or allocate it before.
template <>
struct parameter_traits<at::Tensor> {
    static BufferView gradient(const at::Tensor& t) { return t.grad().defined() ? buffer(t.grad()) : BufferView{}; }
    static BufferView value(const at::Tensor& t) { return buffer(t); }
    static at::IntArrayRef shape(const at::Tensor& t) { return t.sizes(); }
    static bool row_major(const at::Tensor& t) { return t.is_contiguous(); }
    static bool requires_grad(const at::Tensor& t) { return t.requires_grad(); }
    static bool may_be_empty(const at::Tensor&) { return true; }  // a 0 in a shape is intended
};

}  // namespace gradsync::inline v0_2
