// SPDX-License-Identifier: BSL-1.0
// plain.cpp on several ranks, here threads, each with its part of every batch: the same losses, but for rounding.

#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include <gradsync/gradsync.hpp>

constexpr int letters = 128, width = 8, inputs = 2 * width + 1;
constexpr int steps = 200, batch = 48;
constexpr float rate = 1;

void train(const std::string& text, gradsync::ThreadBackend comm) {
    float embedding[letters * width], embedding_grad[letters * width];
    float output[letters * inputs] = {}, output_grad[letters * inputs];
    unsigned seed = 1;
    for (float& x : embedding) x = static_cast<float>((seed = seed * 1664525 + 1013904223) >> 8) / 16777216.0f - 0.5f;

    std::vector parameters{gradsync::parameter("embedding", embedding, embedding_grad), gradsync::parameter("output", output, output_grad)};
    // A sum, of shares: each has been divided by the whole batch.
    gradsync::Reducer sync(comm, parameters, {.averaging = gradsync::Averaging::sum});

    for (int step = 1; step <= steps; ++step) {
        float loss = 0;
        for (float& g : embedding_grad) g = 0;
        for (float& g : output_grad) g = 0;
        for (int i = comm.rank(); i < batch; i += comm.size()) {
            const std::size_t place = static_cast<std::size_t>(step * batch + i) * 7919 % (text.size() - 2);
            const int first = text[place] & 127, second = text[place + 1] & 127, next = text[place + 2] & 127;

            float x[inputs], score[letters], sum = 0;
            for (int k = 0; k < width; ++k) x[k] = embedding[first * width + k], x[width + k] = embedding[second * width + k];
            x[inputs - 1] = 1;
            for (int c = 0; c < letters; ++c) {
                score[c] = 0;
                for (int k = 0; k < inputs; ++k) score[c] += output[c * inputs + k] * x[k];
                sum += score[c] = std::exp(score[c]);
            }
            loss -= std::log(score[next] / sum) / batch;

            for (int c = 0; c < letters; ++c) {
                const float g = (score[c] / sum - (c == next ? 1.0f : 0.0f)) / batch;
                for (int k = 0; k < inputs; ++k) output_grad[c * inputs + k] += g * x[k];
                for (int k = 0; k < width; ++k) embedding_grad[first * width + k] += g * output[c * inputs + k];
                for (int k = 0; k < width; ++k) embedding_grad[second * width + k] += g * output[c * inputs + width + k];
            }
        }

        for (std::size_t p : {1, 0}) sync.mark_ready(p);
        sync.finish();
        comm.all_reduce(gradsync::buffer(std::span(&loss, 1)), gradsync::ReduceOp::sum).wait();
        for (int k = 0; k < letters * width; ++k) embedding[k] -= rate * embedding_grad[k];
        for (int k = 0; k < letters * inputs; ++k) output[k] -= rate * output_grad[k];
        if (step % 20 == 0 && comm.rank() == 0) std::printf("step %d: loss %.6f\n", step, static_cast<double>(loss));
    }
}

int main(int argc, char** argv) {
    std::ifstream file(argc > 1 ? argv[1] : "README.md");
    const std::string text(std::istreambuf_iterator<char>(file), {});
    if (text.size() < 100) return std::fprintf(stderr, "usage: %s [a text of at least 100 bytes; README.md if not given]\n", argv[0]), 2;
    gradsync::run_threads(2, [&](gradsync::ThreadBackend comm) { train(text, comm); });
}
