// SPDX-License-Identifier: BSL-1.0
// A trainer for GPUs, with its kernels: y = w x + b by gradient descent. Each rank is a process with a device and data of its own.
#include <gradsync/backend/nccl.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/interop/pointer.hpp>

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
__global__ void step(int count, float* weight, const float* gradient, float rate) {
    const int i = static_cast<int>(threadIdx.x);
    if (i < count) weight[i] -= rate * gradient[i];
}

float train(gs::NcclBackend comm) {
    const gs::cuda::Stream stream = gs::cuda::make_stream();
    comm.set_stream(stream.get());  // the stream of the kernels below
    const auto floats = [](const gs::cuda::DeviceMemory& memory) { return static_cast<float*>(memory.data()); };
    const gs::cuda::DeviceMemory memory_w(2 * inputs * 4), memory_b(2 * 4), memory_residual(samples * 4);  // weights, then gradients
    float *const w = floats(memory_w), *const dw = w + inputs, *const b = floats(memory_b), *const db = b + 1;
    float* const residual = floats(memory_residual);

    gs::Reducer sync(comm, {gs::parameter("w", gs::device_buffer(w, inputs), gs::device_buffer(dw, inputs)),
                            gs::parameter("b", gs::device_buffer(b, 1), gs::device_buffer(db, 1))});
    sync.broadcast_parameters();
    for (int i = 0; i < 500; ++i) {
        forward<<<1, samples, 0, stream.get()>>>(comm.rank(), w, b, residual);
        backward<<<1, 32, 0, stream.get()>>>(comm.rank(), 1, true, residual, db);
        sync.mark_ready(1);  // its kernel is on the stream: no host waits for it
        backward<<<1, inputs, 0, stream.get()>>>(comm.rank(), inputs, false, residual, dw);
        sync.mark_ready(0);
        sync.finish();  // kernels that follow on the stream find the mean over all ranks
        step<<<1, inputs, 0, stream.get()>>>(inputs, w, dw, 0.02f);
        step<<<1, 32, 0, stream.get()>>>(1, b, db, 0.02f);
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
