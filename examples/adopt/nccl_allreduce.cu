// SPDX-License-Identifier: BSL-1.0
// A typical trainer over NCCL: all layers in one arena, and one ncclAllReduce per layer, on a stream of its own, inside the backward.
// nccl_gradsync.cu is the same trainer with gradsync; docs/migration/nccl.md explains the difference.
//
//     nccl_allreduce RANK RANKS FILE     in each process; FILE: does not exist yet, and all ranks can reach it
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <unistd.h>

#include <cuda_runtime.h>
#include <nccl.h>

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

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    const int rank = std::atoi(argv[1]), ranks = std::atoi(argv[2]);
    int devices = 0;
    CHECK(cudaGetDeviceCount(&devices));
    CHECK(cudaSetDevice(rank % devices));
    ncclUniqueId id;
    const std::string path = argv[3], part = path + ".part";
    if (rank == 0) {
        CHECK(ncclGetUniqueId(&id));
        std::FILE* file = std::fopen(part.c_str(), "wb");
        if (!file || std::fwrite(&id, sizeof id, 1, file) != 1 || std::fclose(file) || std::rename(part.c_str(), path.c_str())) return 1;
    } else {
        std::FILE* file;
        while (!(file = std::fopen(path.c_str(), "rb"))) usleep(1000);
        if (std::fread(&id, sizeof id, 1, file) != 1 || std::fclose(file)) return 1;
    }
    ncclComm_t comm;
    CHECK(ncclCommInitRank(&comm, ranks, id, rank));
    cudaStream_t compute, transfer;
    CHECK(cudaStreamCreate(&compute));
    CHECK(cudaStreamCreate(&transfer));
    cudaEvent_t event;
    CHECK(cudaEventCreate(&event));

    float *weights = device(layers * layer), *grads = device(layers * layer);  // the arenas
    float *x = device((layers + 1) * batch * width), *e = device((layers + 1) * batch * width);
    std::mt19937 random(static_cast<unsigned>(rank));  // each rank draws samples of its own
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<float> drawn(layers * layer), input(batch * width), output(batch * width);
    for (float& w : drawn) w = uniform(random) / 6;
    CHECK(cudaMemcpy(weights, drawn.data(), drawn.size() * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(ncclBroadcast(weights, weights, layers * layer, ncclFloat, 0, comm, compute));

    for (int step = 0; step < steps; ++step) {
        for (float& value : input) value = uniform(random);
        CHECK(cudaMemcpyAsync(x, input.data(), input.size() * sizeof(float), cudaMemcpyHostToDevice, compute));
        const auto at = [](float* memory, int l) { return memory + l * batch * width; };
        for (int l = 0; l < layers; ++l) forward<<<batch, width, 0, compute>>>(weights + l * layer, at(x, l), at(x, l + 1));
        start_backward<<<batch, width, 0, compute>>>(at(x, layers), x, at(e, layers));
        for (int l = layers - 1; l >= 0; --l) {
            backward_weights<<<width, width, 0, compute>>>(at(e, l + 1), at(x, l), grads + l * layer);
            CHECK(cudaEventRecord(event, compute));
            CHECK(cudaStreamWaitEvent(transfer, event, 0));
            CHECK(ncclAllReduce(grads + l * layer, grads + l * layer, layer, ncclFloat, ncclAvg, comm, transfer));
            backward_inputs<<<batch, width, 0, compute>>>(at(e, l + 1), weights + l * layer, at(x, l), at(e, l));
        }
        CHECK(cudaEventRecord(event, transfer));
        CHECK(cudaStreamWaitEvent(compute, event, 0));
        sgd<<<layers * width, width, 0, compute>>>(weights, grads, 4.0f);
        if (step % 20 != 0) continue;
        CHECK(cudaMemcpyAsync(output.data(), at(x, layers), output.size() * sizeof(float), cudaMemcpyDeviceToHost, compute));
        CHECK(cudaStreamSynchronize(compute));
        float loss = 0;
        for (std::size_t i = 0; i < output.size(); ++i) loss += (output[i] - input[i] / 2) * (output[i] - input[i] / 2);
        if (rank == 0) std::printf("step %d: loss of rank 0 %.6f\n", step, static_cast<double>(loss / (batch * width)));
    }
    CHECK(cudaStreamSynchronize(compute));
    CHECK(ncclCommDestroy(comm));
}
