// SPDX-License-Identifier: BSL-1.0
// packed_plain.cpp on several ranks: threads, or the processes of a job. Each takes its part of the batch. Layers travel while earlier ones
// are computed, from where they lie.
//
//     packed [TEXT [BATCH [WIDTH [RANKS]]]]     BATCH: of all ranks; 2 threads if not given, unless RANK and WORLD_SIZE name a job

#include <sys/resource.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "on_ranks.hpp"

constexpr std::size_t letters = 128, layers = 8;
constexpr int context = 3, steps = 40;

/// The tensors of an arena, each (layers, ...) but the first.
struct Tensors {
    float *embedding, *w, *b;
    Tensors(float* arena, std::size_t width) : embedding(arena), w(embedding + letters * width), b(w + layers * width * width) {}
    static std::size_t count(std::size_t width) { return (letters + layers * width + layers) * width; }
};

struct Model {
    std::size_t width, count = Tensors::count(width);
    std::vector<float> weights = std::vector<float>(count), gradients = std::vector<float>(count);
    std::vector<float> mean = std::vector<float>(count), square = std::vector<float>(count);
    Tensors value{weights.data(), width}, gradient{gradients.data(), width};
    std::vector<std::vector<float>> hidden = std::vector<std::vector<float>>(layers + 1, std::vector<float>(width));

    explicit Model(std::size_t numbers) : width(numbers) {
        std::mt19937 random(1);
        std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(width)));
        for (std::size_t i = 0; i < count - layers * width; ++i) weights[i] = normal(random);
    }
    Model(const Model&) = delete;

    /// Computes the loss of one sample, and what the backward needs.
    float forward(const char* at, std::vector<float>& output) {
        hidden[0].assign(width, 0);
        for (int i = 0; i < context; ++i)
            for (std::size_t k = 0; k < width; ++k) hidden[0][k] += value.embedding[static_cast<std::size_t>(at[i] & 127) * width + k];
        for (std::size_t l = 0; l < layers; ++l)
            for (std::size_t k = 0; k < width; ++k) {
                float sum = value.b[l * width + k];
                for (std::size_t j = 0; j < width; ++j) sum += value.w[(l * width + k) * width + j] * hidden[l][j];
                hidden[l + 1][k] = hidden[l][k] + std::tanh(sum);
            }
        float sum = 0;
        for (std::size_t c = 0; c < letters; ++c) {
            output[c] = 0;
            for (std::size_t k = 0; k < width; ++k) output[c] += value.embedding[c * width + k] * hidden[layers][k];
            sum += output[c] = std::exp(output[c] / std::sqrt(static_cast<float>(width)));
        }
        for (float& p : output) p /= sum;
        return -std::log(output[static_cast<std::size_t>(at[context] & 127)]);
    }

    /// Adds a sample's part to the gradients, layer by layer.
    void backward(const char* at, std::vector<float>& output, float scale, auto ready) {
        std::vector<float> error(width), inner(width);
        output[static_cast<std::size_t>(at[context] & 127)] -= 1;
        for (std::size_t c = 0; c < letters; ++c)
            for (std::size_t k = 0; k < width; ++k) {
                const float e = output[c] * scale / std::sqrt(static_cast<float>(width));
                gradient.embedding[c * width + k] += e * hidden[layers][k];
                error[k] += e * value.embedding[c * width + k];
            }
        ready(layers);  // the embedding, as output layer
        for (std::size_t l = layers; l-- > 0;) {
            for (std::size_t k = 0; k < width; ++k) {
                const float t = hidden[l + 1][k] - hidden[l][k];
                inner[k] = error[k] * (1 - t * t);
                gradient.b[l * width + k] += inner[k];
            }
            for (std::size_t k = 0; k < width; ++k)
                for (std::size_t j = 0; j < width; ++j) {
                    gradient.w[(l * width + k) * width + j] += inner[k] * hidden[l][j];
                    error[j] += inner[k] * value.w[(l * width + k) * width + j];
                }
            ready(l);
        }
        for (int i = 0; i < context; ++i)
            for (std::size_t k = 0; k < width; ++k) gradient.embedding[static_cast<std::size_t>(at[i] & 127) * width + k] += error[k];
        ready(layers);  // the embedding, as first layer
    }
};

void adam(float* w, const float* g, float* m, float* v, std::size_t count, int step) {
    for (std::size_t i = 0; i < count; ++i) {
        m[i] += 0.1f * (g[i] - m[i]);
        v[i] += 0.01f * (g[i] * g[i] - v[i]);
        const float unbiased = m[i] / (1 - std::pow(0.9f, static_cast<float>(step)));
        w[i] -= 0.003f * unbiased / (std::sqrt(v[i] / (1 - std::pow(0.99f, static_cast<float>(step)))) + 1e-8f);
    }
}

void train(auto comm, const std::string& text, int batch, std::size_t width) {
    Model model(width);
    const auto arenas = gradsync::packed(model.weights, model.gradients,
                                         {{"embedding", {letters, width}, 0, 2}, {"w", {width, width}, layers}, {"b", {width}, layers}});
    gradsync::Reducer sync(comm, arenas, {.averaging = gradsync::Averaging::sum});
    sync.broadcast_parameters();
    std::vector<float> output(letters);
    for (int step = 1; step <= steps; ++step) {
        float loss = 0;
        model.gradients.assign(model.count, 0);
        for (int s = comm.rank(); s < batch; s += comm.size()) {
            const auto sample = static_cast<std::size_t>(step * batch + s);
            const char* const at = text.data() + sample * 7919 % (text.size() - context);
            loss += model.forward(at, output) / static_cast<float>(batch);
            model.backward(at, output, 1 / static_cast<float>(batch), [&](std::size_t l) {
                if (s + comm.size() < batch) return;  // more samples follow
                if (l == layers) sync.mark_ready("embedding");
                else sync.mark_ready(arenas.layer(l));
            });
        }
        sync.finish();
        gradsync::sum(comm, loss);
        adam(model.weights.data(), model.gradients.data(), model.mean.data(), model.square.data(), model.count, step);
        if (comm.rank() == 0) std::printf("step %d: loss %.9g\n", step, static_cast<double>(loss));
    }
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    std::printf("peak memory: %ld KiB\n", used.ru_maxrss);
}

int main(int argc, char** argv) {
    std::ifstream file(argc > 1 ? argv[1] : "README.md");
    const std::string text(std::istreambuf_iterator<char>(file), {});
    const int batch = argc > 2 ? std::atoi(argv[2]) : 32, width = argc > 3 ? std::atoi(argv[3]) : 64;
    if (text.size() < 100 || batch < 1 || width < 1)
        return std::fprintf(stderr, "%s: give a text of 100 bytes or more, a batch and a width\n", argv[0]), 2;
    return on_ranks(argc > 4 ? std::atoi(argv[4]) : 2, [&](auto comm) { train(comm, text, batch, static_cast<std::size_t>(width)); });
}
