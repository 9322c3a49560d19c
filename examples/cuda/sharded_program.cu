// SPDX-License-Identifier: BSL-1.0
// first_program.cu with ZeRO: each rank keeps and steps its share of the optimizer's state, by a kernel of its own.
#include <gradsync/backend/nccl.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/interop/pointer.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include <cmath>
#include <cstdio>

namespace gs = gradsync;

constexpr int inputs = 64, samples = 128;

__device__ float input(int rank, int sample, int i) { return static_cast<float>((rank * 37 + sample * 11 + i * i) % 17) / 8 - 1; }

// One thread for each sample: residual = prediction - truth, where the truth is w = 3, b = 2.
__global__ void forward(int rank, const float* w, const float* b, float* residual) {
    const int sample = static_cast<int>(threadIdx.x);
    float sum = *b - 2;
    for (int i = 0; i < inputs; ++i) sum += (w[i] - 3) * input(rank, sample, i);
    residual[sample] = sum;
}
// One thread for each of `count` weights, or for the bias.
__global__ void backward(int rank, int count, bool bias, const float* residual, float* gradient) {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= count) return;
    float sum = 0;
    for (int sample = 0; sample < samples; ++sample) sum += residual[sample] * (bias ? 1 : input(rank, sample, i));
    gradient[i] = sum / samples;
}

__global__ void momentum(int count, float* weight, float* velocity, const float* gradient, float scale, float rate) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    velocity[i] = 0.5f * velocity[i] + gradient[i] * scale;
    weight[i] -= rate * velocity[i];
}

// gs::cuda::AdamW is one like it, and steps all slices in one launch.
struct Momentum {
    std::size_t state_count() const { return 1; }  // arrays of state, zero at first, kept by the library
    void begin_step() {}
    void step(std::span<const gs::DeviceSlice> slices, double scale, cudaStream_t stream) const {
        for (const gs::DeviceSlice& s : slices) {
            const int count = static_cast<int>(s.master.count);
            float *const weight = static_cast<float*>(s.master.data), *const velocity = static_cast<float*>(s.state[0]);
            const float* const gradient = static_cast<const float*>(s.gradient.data);
            momentum<<<(count + 255) / 256, 256, 0, stream>>>(count, weight, velocity, gradient, static_cast<float>(scale), 0.01f);
        }
    }
};

float train(gs::NcclBackend comm) {
    const gs::cuda::Stream stream = gs::cuda::make_stream();
    comm.set_stream(stream.get());  // the stream of the kernels below
    const gs::cuda::DeviceMemory memory_w(inputs * 4), memory_b(4), memory_residual(samples * 4);
    const auto floats = [](const gs::cuda::DeviceMemory& memory) { return static_cast<float*>(memory.data()); };
    float *const w = floats(memory_w), *const b = floats(memory_b), *const residual = floats(memory_residual);

    // Gradients have memory while they are needed.
    gs::ShardedOptimizer sharded(comm,
                                 {{.name = "w", .value = gs::device_buffer(w, inputs)}, {.name = "b", .value = gs::device_buffer(b, 1)}},
                                 Momentum{}, gs::Zero2{});
    sharded.broadcast_parameters();
    for (int i = 0; i < 500; ++i) {
        forward<<<1, samples, 0, stream.get()>>>(comm.rank(), w, b, residual);
        float* const gradient_b = static_cast<float*>(sharded.acquire_gradient(1).data);
        backward<<<1, 32, 0, stream.get()>>>(comm.rank(), 1, true, residual, gradient_b);
        sharded.mark_ready(1);
        float* const gradient_w = static_cast<float*>(sharded.acquire_gradient(0).data);
        backward<<<1, inputs, 0, stream.get()>>>(comm.rank(), inputs, false, residual, gradient_w);
        sharded.mark_ready(0);
        sharded.finish();  // this rank's shards of the means
        sharded.step();    // shards are stepped, and kernels that follow on the stream find all weights
    }
    float result = 0;
    gs::cuda::copy(&result, b, sizeof result, cudaMemcpyDeviceToHost, stream.get());
    gs::cuda::check(cudaStreamSynchronize(stream.get()), "the kernels");
    return result;
}

int main() try {
    if (int devices = 0; cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return std::puts("there is no device"), 77;
    const float b = train(gs::NcclBackend::from_environment());
    std::printf("b = %.2f\n", static_cast<double>(b));
    return std::abs(b - 2) < 0.01f ? 0 : 1;
} catch (const gs::Error& error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
}
