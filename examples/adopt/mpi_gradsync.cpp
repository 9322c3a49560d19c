// SPDX-License-Identifier: BSL-1.0
// mpi_allreduce.cpp with gradsync: the gradients of a layer travel while the backward computes those of the layers before it.
// docs/migration/mpi-allreduce.md explains the difference.
//
//     mpirun -n 2 mpi_gradsync
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <gradsync/backend/mpi.hpp>
#include <gradsync/gradsync.hpp>

constexpr int widths[] = {4, 96, 96, 1}, layers = 3, batch = 32, steps = 200;
constexpr float rate = 0.05f;

/// Layer l has widths[l + 1] rows of widths[l] weights and a bias.
struct Net {
    std::vector<float> values, grads;  // the arenas
    std::size_t first[layers + 1] = {};
    std::vector<float> outputs[layers + 1];  // outputs[0]: the inputs

    Net() {
        for (int l = 0; l < layers; ++l) first[l + 1] = first[l] + std::size_t(widths[l + 1] * (widths[l] + 1));
        values.resize(first[layers]), grads.resize(first[layers]);
        for (int l = 0; l <= layers; ++l) outputs[l].resize(std::size_t(batch * widths[l]));
    }
    void forward() {
        for (int l = 0; l < layers; ++l)
            for (int b = 0; b < batch; ++b)
                for (int o = 0; o < widths[l + 1]; ++o) {
                    const float *row = &values[first[l] + std::size_t(o * (widths[l] + 1))], *in = &outputs[l][std::size_t(b * widths[l])];
                    float sum = row[widths[l]];
                    for (int i = 0; i < widths[l]; ++i) sum += row[i] * in[i];
                    outputs[l + 1][std::size_t(b * widths[l + 1] + o)] = l + 1 < layers ? std::tanh(sum) : sum;
                }
    }
    /// `error`: of the last outputs. Computes the gradients, those of the last layer first.
    void backward(std::vector<float> error, auto ready) {
        for (int l = layers - 1; l >= 0; --l) {
            std::vector<float> before(outputs[l].size());
            std::fill(grads.begin() + std::ptrdiff_t(first[l]), grads.begin() + std::ptrdiff_t(first[l + 1]), 0.0f);
            for (int b = 0; b < batch; ++b)
                for (int o = 0; o < widths[l + 1]; ++o) {
                    const std::size_t at = first[l] + std::size_t(o * (widths[l] + 1)), in = std::size_t(b * widths[l]);
                    const float e = error[std::size_t(b * widths[l + 1] + o)];
                    for (std::size_t i = 0; i < std::size_t(widths[l]); ++i) {
                        grads[at + i] += e * outputs[l][in + i];
                        before[in + i] += e * values[at + i] * (1 - outputs[l][in + i] * outputs[l][in + i]);
                    }
                    grads[at + std::size_t(widths[l])] += e;
                }
            ready(std::size_t(l));  // layer l's gradients may travel now
            error = before;
        }
    }
};

int main(int argc, char** argv) try {
    int level = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    std::mt19937 random(static_cast<unsigned>(rank));  // each rank draws samples of its own
    std::uniform_real_distribution<float> uniform(-1, 1);
    Net net;
    for (float& value : net.values) value = uniform(random) / 4;
    gradsync::MpiBackend comm(MPI_COMM_WORLD);
    std::vector<gradsync::ParameterView> parameters;
    for (int l = 0; l < layers; ++l) {
        const auto part = [&](std::vector<float>& arena) { return std::span(&arena[net.first[l]], net.first[l + 1] - net.first[l]); };
        parameters.push_back(gradsync::parameter("layer " + std::to_string(l), part(net.values), part(net.grads)));
    }
    gradsync::Reducer sync(comm, parameters);
    sync.broadcast_parameters();
    for (int step = 0; step < steps; ++step) {
        for (float& x : net.outputs[0]) x = uniform(random);
        net.forward();
        float loss = 0;
        std::vector<float> error(batch);
        for (std::size_t b = 0; b < batch; ++b) {
            const float *x = &net.outputs[0][b * 4], difference = net.outputs[layers][b] - std::sin(3 * x[0]) * x[1] - x[2];
            loss += difference * difference / batch;
            error[b] = 2 * difference / batch;
        }
        sync.backward([&](auto ready) { net.backward(error, ready); });
        for (std::size_t i = 0; i < net.values.size(); ++i) net.values[i] -= rate * net.grads[i];
        if (step % 20 != 0) continue;
        gradsync::average(comm, loss);
        if (rank == 0) std::printf("step %d: loss %.6f\n", step, double(loss));
    }
    MPI_Finalize();
} catch (const gradsync::Error& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return MPI_Abort(MPI_COMM_WORLD, 1);
}
