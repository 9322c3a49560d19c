// SPDX-License-Identifier: BSL-1.0
// plain_processes.cpp over MPI: the ranks are those of MPI_COMM_WORLD, and between machines MPI carries the messages.
//
//     mpirun -n 2 plain_mpi [TEXT [BATCH [RATE]]]

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/interop/boost_mpi.hpp>

constexpr int letters = 128, context = 3, width = 64, steps = 200;

struct Sample {
    int before[context], next;
    float hidden[width], output[letters];  // the forward writes them
};
using Batch = std::vector<Sample>;

/// Samples `begin` to `begin + count`. Neighbours come from different parts of the text.
Batch load(const std::string& text, int begin, int count) {
    Batch batch;
    for (int i = begin; i < begin + count; ++i) {
        const char* at = text.data() + static_cast<std::size_t>(i) * 7919 % (text.size() - context);
        batch.push_back({{at[0] & 127, at[1] & 127, at[2] & 127}, at[3] & 127, {}, {}});
    }
    return batch;
}

struct Net {
    using Matrix = std::vector<float>;  // rows of `width` elements
    Matrix first = Matrix(context * letters * width), first_grad = first;
    Matrix last = Matrix(letters * width), last_grad = last;

    Net() {
        std::mt19937 random(1);
        std::normal_distribution<float> normal(0, 0.2f);
        for (float& x : first) x = normal(random);
    }
    static float* row(Matrix& matrix, int i) { return matrix.data() + i * width; }

    /// Returns the mean loss of the batch.
    float forward(Batch& batch) {
        float loss = 0;
        for (Sample& s : batch) {
            for (int k = 0; k < width; ++k) {
                for (int i = 0; i < context; ++i) s.hidden[k] += row(first, i * letters + s.before[i])[k];
                s.hidden[k] = std::tanh(s.hidden[k]);
            }
            float sum = 0;
            for (int c = 0; c < letters; ++c) {
                for (int k = 0; k < width; ++k) s.output[c] += row(last, c)[k] * s.hidden[k];
                sum += s.output[c] = std::exp(s.output[c]);
            }
            for (float& p : s.output) p /= sum;
            loss -= std::log(s.output[s.next]) / static_cast<float>(batch.size());
        }
        return loss;
    }

    /// Computes the gradients of the mean loss, those of the last layer first.
    void backward(Batch& batch, auto ready) {
        last_grad.assign(last.size(), 0);
        for (Sample& s : batch) {
            s.output[s.next] -= 1;
            for (float& error : s.output) error /= static_cast<float>(batch.size());
            for (int c = 0; c < letters; ++c)
                for (int k = 0; k < width; ++k) row(last_grad, c)[k] += s.output[c] * s.hidden[k];
        }
        ready(1);  // the last layer's gradient may travel now

        first_grad.assign(first.size(), 0);
        for (Sample& s : batch) {
            for (int k = 0; k < width; ++k) {
                float error = 0;
                for (int c = 0; c < letters; ++c) error += s.output[c] * row(last, c)[k];
                error *= 1 - s.hidden[k] * s.hidden[k];
                for (int i = 0; i < context; ++i) row(first_grad, i * letters + s.before[i])[k] += error;
            }
        }
        ready(0);  // the first layer's, too
    }

    void step(float rate) {
        for (std::size_t i = 0; i < first.size(); ++i) first[i] -= rate * first_grad[i];
        for (std::size_t i = 0; i < last.size(); ++i) last[i] -= rate * last_grad[i];
    }
};

void train(gradsync::Backend auto comm, const std::string& text, int batch, float rate) {
    Net net;
    std::vector parameters{gradsync::parameter("first", net.first, net.first_grad), gradsync::parameter("last", net.last, net.last_grad)};
    gradsync::Reducer sync(comm, parameters);
    sync.broadcast_parameters();
    for (int step = 0; step < steps; ++step) {
        Batch data = load(text, (step * comm.size() + comm.rank()) * batch, batch);
        float loss = net.forward(data);
        sync.backward([&](auto ready) { net.backward(data, ready); });
        net.step(rate * static_cast<float>(comm.size()));
        if (step % 20 != 0) continue;
        gradsync::average(comm, loss);
        if (comm.rank() == 0) std::printf("step %d: loss %.6f\n", step, static_cast<double>(loss));
    }
}

int main(int argc, char** argv) {
    std::ifstream file(argc > 1 ? argv[1] : "README.md");
    const std::string text(std::istreambuf_iterator<char>(file), {});
    const int batch = argc > 2 ? std::atoi(argv[2]) : 32;
    const float rate = argc > 3 ? std::strtof(argv[3], nullptr) : 0.5f;
    if (text.size() < 100 || batch < 1) return std::fprintf(stderr, "%s: give a text of 100 bytes or more, and a batch\n", argv[0]), 2;
    boost::mpi::environment environment(argc, argv, boost::mpi::threading::multiple, false);
    try {
        train(gradsync::MpiBackend(boost::mpi::communicator()), text, batch, rate);
    } catch (const gradsync::Error& error) {  // says what happened, on which rank, and what to do
        std::fprintf(stderr, "%s\n", error.what());
        std::_Exit(1);  // ~environment would wait for ranks that are gone
    }
}
