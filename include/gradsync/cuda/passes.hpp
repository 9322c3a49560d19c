// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cuda_runtime_api.h>

#include "../core/flat_optimizer.hpp"
#include "../core/list.hpp"

/// Passes over device memory, on a stream: the device counterpart of kernel/. All return at once. They throw
/// Error(device_failed) if they cannot start, and Error(invalid_argument) for an unsupported dtype. Everything is
/// computed in the accumulator's type and rounded once.
///
/// They are defined in cuda/passes.cu, which nvcc compiles: link the target gradsync::cuda, or add that file to your
/// program. Otherwise their addresses are null, and `linked()` returns false. Sums over NCCL do not need them.

namespace gradsync::inline v0_2::cuda {

/// to[i] = from[i], rounded to the type of `to`. Both types must be floating, or equal. May be in place.
[[gnu::weak]] void convert(ConstBufferView from, BufferView to, cudaStream_t stream);

/// to[i] += from[i].
[[gnu::weak]] void add(BufferView to, ConstBufferView from, cudaStream_t stream);

/// buffer[i] *= factor.
[[gnu::weak]] void scale(BufferView buffer, double factor, cudaStream_t stream);

/// to[i] = from[i] * factor. If the factor is 0, to[i] = 0 even for a NaN. `factor` is in device memory. Both buffers
/// must have one dtype. May be in place.
[[gnu::weak]] void scale_by(ConstBufferView from, BufferView to, const double* factor, cudaStream_t stream);

/// Clamps buffer[i] to [-limit, limit]. A NaN stays.
[[gnu::weak]] void clamp(BufferView buffer, double limit, cudaStream_t stream);

/// sums[k] = the sum of the squares of blocks[k], in double, in a fixed order.
/// All memory is device memory, `blocks` too.
[[gnu::weak]] void sums_of_squares(const ConstBufferView* blocks, std::size_t count, double* sums, cudaStream_t stream);

/// The factor of one rank's elements in a mean, from its scale and the sum of all weights.
struct MeanFactor {
    double weight = 0;   ///< in: sum of the weights of all ranks
    double factor = 0;   ///< out: scale / weight; 0 if the weight is 0
    float factor32 = 0;  ///< out: the same in f32
};
/// Computes the factors of `cell`, which is in device memory.
[[gnu::weak]] void mean_factor(MeanFactor* cell, double scale, cudaStream_t stream);

/// The coefficients of a step of AdamW that are the same for all elements of a slice.
struct AdamWRule {
    float gradient_scale, beta1, beta2;
    float step_size;          ///< learning rate / (1 - beta1^t)
    float second_correction;  ///< 1 / (1 - beta2^t)
    float epsilon;
    float shrink;  ///< 1 - learning rate * weight decay
};
struct SgdRule {
    float gradient_scale, rate, momentum, decay;
    bool nesterov;
};
/// Steps of an optimizer; see optimizers.hpp. `rules`: by slice. If `factor` is not null, gradients are also multiplied
/// by `*factor`, which is in device memory.
[[gnu::weak]] void adamw(ListView<const DeviceSlice> slices, ListView<const AdamWRule> rules, const float* factor,
                         cudaStream_t stream);
[[gnu::weak]] void sgd(ListView<const DeviceSlice> slices, ListView<const SgdRule> rules, const float* factor,
                       cudaStream_t stream);

/// Are the passes linked into this program?
inline bool linked() noexcept { return &mean_factor != nullptr; }

}  // namespace gradsync::inline v0_2::cuda
