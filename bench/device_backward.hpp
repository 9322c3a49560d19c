// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gradsync/core/buffer_view.hpp>
#include <gradsync/core/parameter.hpp>
#include <gradsync/cuda/runtime.hpp>

#include "cuda/matmul.hpp"

namespace bench {

/// The products of a backward through linear layers: what a device computes while gradients travel. For each layer, last one first,
/// the gradient of its input and that of its weights, in f32 from bf16 factors that stay what they are.
class DeviceBackward {
public:
    struct Shape {
        std::size_t layers, width, tokens;
    };

    DeviceBackward(Shape shape, cudaStream_t stream)
        : shape_(shape),
          stream_(stream),
          activations_(bytes_of(shape.tokens)),
          output_gradient_(bytes_of(shape.tokens)),
          weights_(bytes_of(shape.width)),
          input_gradient_(shape.tokens * shape.width * sizeof(float)) {
        fill(activations_, shape.tokens, 3);
        fill(output_gradient_, shape.tokens, 5);
        fill(weights_, shape.width, 7);
    }

    std::size_t layers() const noexcept { return shape_.layers; }
    std::size_t gradient_count() const noexcept { return shape_.width * shape_.width; }  ///< of one layer

    /// The layers' weights as parameters, whose gradients have no memory of their own.
    std::vector<gradsync::ParameterView> parameters() const {
        std::vector<gradsync::ParameterView> views;
        for (std::size_t i = 0; i < layers(); ++i)
            views.push_back({.name = "layer" + std::to_string(i),
                             .gradient = {nullptr, gradient_count(), gradsync::DType::f32, gradsync::MemorySpace::device}});
        return views;
    }

    /// Puts it on the stream: layer i's gradient goes to `gradient_of(i)`; `ready(i)` when the product is on the stream.
    template <class GradientOf, class Ready>
    void run(GradientOf&& gradient_of, Ready&& ready) {
        const std::size_t d = shape_.width, t = shape_.tokens;
        for (std::size_t i = layers(); i-- > 0;) {
            multiply_(CUDA_R_16BF, {t, d, d}, {output_gradient_.data(), d}, {weights_.data(), d, true},
                      {.data = input_gradient_.data(), .type = CUDA_R_32F, .leading = d}, stream_);
            multiply_(CUDA_R_16BF, {d, d, t}, {activations_.data(), d, true}, {output_gradient_.data(), d},
                      {.data = gradient_of(i), .type = CUDA_R_32F, .leading = d}, stream_);
            ready(i);
        }
    }

private:
    std::size_t bytes_of(std::size_t rows) const noexcept { return rows * shape_.width * sizeof(__nv_bfloat16); }

    /// Small whole numbers, whose products add up exactly.
    void fill(const gradsync::cuda::DeviceMemory& matrix, std::size_t rows, std::uint32_t seed) const {
        std::vector<__nv_bfloat16> values(rows * shape_.width);
        for (std::size_t i = 0; i < values.size(); ++i)
            values[i] = __float2bfloat16(static_cast<float>((i * seed + i / shape_.width) % 5) - 2);
        gradsync::cuda::check(cudaMemcpy(matrix.data(), values.data(), matrix.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    }

    Shape shape_;
    cudaStream_t stream_;
    gradsync::cuda::DeviceMemory activations_, output_gradient_, weights_, input_gradient_;
    gradsync_train::Matmul multiply_;
};

}  // namespace bench
