// SPDX-License-Identifier: BSL-1.0
// A typical trainer over MPI: a net in one arena, whose gradients one MPI_Allreduce adds up after the backward.
// mpi_gradsync.cpp is the same trainer with gradsync; docs/migration/mpi-allreduce.md explains the difference.
//
//     mpirun -n 2 mpi_allreduce
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

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
    void backward(std::vector<float> error) {
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
            error = before;
        }
    }
};

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    int rank = 0, size = 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    std::mt19937 random(static_cast<unsigned>(rank));  // each rank draws samples of its own
    std::uniform_real_distribution<float> uniform(-1, 1);
    Net net;
    for (float& value : net.values) value = uniform(random) / 4;
    MPI_Bcast(net.values.data(), int(net.values.size()), MPI_FLOAT, 0, MPI_COMM_WORLD);
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
        net.backward(error);
        MPI_Allreduce(MPI_IN_PLACE, net.grads.data(), int(net.grads.size()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        for (float& g : net.grads) g /= float(size);
        for (std::size_t i = 0; i < net.values.size(); ++i) net.values[i] -= rate * net.grads[i];
        if (step % 20 != 0) continue;
        MPI_Allreduce(MPI_IN_PLACE, &loss, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        if (rank == 0) std::printf("step %d: loss %.6f\n", step, double(loss / float(size)));
    }
    MPI_Finalize();
}
