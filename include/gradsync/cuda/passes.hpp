// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "../core/buffer_view.hpp"
#include "../core/reduce_op.hpp"

/// Passes over device memory, on a stream: what kernel/ is for the host's. All return at once and throw Error(device_failed)
/// where they cannot be started; everything is computed in the accumulator's type and rounded once.
///
/// They are defined in cuda/passes.cu, which nvcc compiles: link the target gradsync::cuda, or add that file to your program.
/// Where neither was done their address is null, and `linked()` says no: sums over NCCL need none of them.

namespace gradsync::inline v0_2::cuda {

/// to[i] = from[i], rounded to the type of `to`. Floating types, or equal ones; may be in place.
[[gnu::weak]] void convert(ConstBufferView from, BufferView to, cudaStream_t stream);

/// to[i] += from[i].
[[gnu::weak]] void add(BufferView to, ConstBufferView from, cudaStream_t stream);

/// buffer[i] *= factor.
[[gnu::weak]] void scale(BufferView buffer, double factor, cudaStream_t stream);

/// to[i] = from[i] * factor, and 0 where the factor is 0, whatever from[i] is. The factor lies in device memory. One dtype; may
/// be in place.
[[gnu::weak]] void scale_by(ConstBufferView from, BufferView to, const double* factor, cudaStream_t stream);

/// buffer[i] limited to [-limit, limit]; a NaN stays.
[[gnu::weak]] void clamp(BufferView buffer, double limit, cudaStream_t stream);

/// One block of a norm: `count` elements at `data`, whose squares add up to sums[place].
struct NormBlock {
    const void* data;
    std::size_t count;
    DType dtype;
};
/// sums[k] = the sum of the squares of blocks[k], in double, in one order; all in device memory.
[[gnu::weak]] void sums_of_squares(const NormBlock* blocks, std::size_t count, double* sums, cudaStream_t stream);

/// What one rank multiplies its elements by in a mean, from what it brings and the sum of all ranks' weights.
struct MeanFactor {
    double weight = 0;   ///< in: the sum of the weights
    double factor = 0;   ///< out: scale / weight, 0 where no rank has any weight
    float factor32 = 0;  ///< out: the same
};
/// Fills `cell`, in device memory.
[[gnu::weak]] void mean_factor(MeanFactor* cell, double scale, cudaStream_t stream);

/// Can they be called?
inline bool linked() noexcept { return &mean_factor != nullptr; }

}  // namespace gradsync::inline v0_2::cuda
