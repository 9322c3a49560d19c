// SPDX-License-Identifier: BSL-1.0
// nccl_allreduce.cu with gradsync: the same collectives, and an error that names the rank if one is lost. docs/migration/nccl.md explains
// the difference.
//
//     torchrun --no-python --nproc-per-node 2 nccl_gradsync     or anything that sets RANK, WORLD_SIZE and LOCAL_RANK
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#include <gradsync/backend/nccl.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/interop/pointer.hpp>

#define CHECK(call) \
    if (auto error = (call)) std::fprintf(stderr, "%s:%d: error %d\n", __FILE__, __LINE__, static_cast<int>(error)), std::exit(1)

constexpr int layers = 3, width = 64, batch = 32, steps = 200, layer = width * width;

/// y = tanh(x w), one thread per element of y.
__global__ void forward(const float* w, const float* x, float* y) {
    float sum = 0;
    for (int i = 0; i < width; ++i) sum += w[threadIdx.x * width + i] * x[blockIdx.x * width + i];
    y[blockIdx.x * width + threadIdx.x] = tanhf(sum);
}
/// The error of the mean square. The target is half of the input.
__global__ void start_backward(const float* y, const float* x, float* e) {
    const int i = blockIdx.x * width + threadIdx.x;
    e[i] = 2 * (y[i] - x[i] / 2) * (1 - y[i] * y[i]) / (batch * width);
}
__global__ void backward_weights(const float* e, const float* x, float* grad) {
    float sum = 0;
    for (int b = 0; b < batch; ++b) sum += e[b * width + blockIdx.x] * x[b * width + threadIdx.x];
    grad[blockIdx.x * width + threadIdx.x] = sum;
}
__global__ void backward_inputs(const float* e, const float* w, const float* x, float* before) {
    float sum = 0;
    for (int o = 0; o < width; ++o) sum += e[blockIdx.x * width + o] * w[o * width + threadIdx.x];
    const int i = blockIdx.x * width + threadIdx.x;
    before[i] = sum * (1 - x[i] * x[i]);
}
__global__ void sgd(float* w, const float* grad, float rate) {
    w[blockIdx.x * width + threadIdx.x] -= rate * grad[blockIdx.x * width + threadIdx.x];
}

float* device(std::size_t count) {
    float* memory = nullptr;
    CHECK(cudaMalloc(reinterpret_cast<void**>(&memory), count * sizeof(float)));
    return memory;
}

int main(int, char** argv) try {
    gradsync::NcclBackend comm = gradsync::NcclBackend::from_environment();  // takes device LOCAL_RANK
    cudaStream_t compute;
    CHECK(cudaStreamCreate(&compute));
    comm.set_stream(compute);

    float *weights = device(layers * layer), *grads = device(layers * layer);  // the arenas
    float *x = device((layers + 1) * batch * width), *e = device((layers + 1) * batch * width);
    std::mt19937 random(static_cast<unsigned>(comm.rank()));  // each rank draws samples of its own
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<float> drawn(layers * layer), input(batch * width), output(batch * width);
    for (float& w : drawn) w = uniform(random) / 6;
    CHECK(cudaMemcpy(weights, drawn.data(), drawn.size() * sizeof(float), cudaMemcpyHostToDevice));
    std::vector<gradsync::ParameterView> parameters;
    for (int l = 0; l < layers; ++l)
        parameters.push_back(gradsync::parameter("layer " + std::to_string(l), gradsync::device_buffer(weights + l * layer, layer),
                                                 gradsync::device_buffer(grads + l * layer, layer)));
    gradsync::Reducer sync(comm, parameters, gradsync::PerParameter());
    sync.broadcast_parameters();

    for (int step = 0; step < steps; ++step) {
        for (float& value : input) value = uniform(random);
        CHECK(cudaMemcpyAsync(x, input.data(), input.size() * sizeof(float), cudaMemcpyHostToDevice, compute));
        const auto at = [](float* memory, int l) { return memory + l * batch * width; };
        for (int l = 0; l < layers; ++l) forward<<<batch, width, 0, compute>>>(weights + l * layer, at(x, l), at(x, l + 1));
        start_backward<<<batch, width, 0, compute>>>(at(x, layers), x, at(e, layers));
        for (int l = layers - 1; l >= 0; --l) {
            backward_weights<<<width, width, 0, compute>>>(at(e, l + 1), at(x, l), grads + l * layer);
            sync.mark_ready(static_cast<std::size_t>(l));
            backward_inputs<<<batch, width, 0, compute>>>(at(e, l + 1), weights + l * layer, at(x, l), at(e, l));
        }
        sync.finish();  // the host does not wait: what is put on `compute` from here on finds the means
        sgd<<<layers * width, width, 0, compute>>>(weights, grads, 4.0f);
        if (step % 20 != 0) continue;
        CHECK(cudaMemcpyAsync(output.data(), at(x, layers), output.size() * sizeof(float), cudaMemcpyDeviceToHost, compute));
        CHECK(cudaStreamSynchronize(compute));
        float loss = 0;
        for (std::size_t i = 0; i < output.size(); ++i) loss += (output[i] - input[i] / 2) * (output[i] - input[i] / 2);
        if (comm.rank() == 0) std::printf("step %d: loss of rank 0 %.6f\n", step, static_cast<double>(loss / (batch * width)));
    }
    CHECK(cudaStreamSynchronize(compute));
} catch (const gradsync::Error& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 1;
}
