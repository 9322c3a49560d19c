// SPDX-License-Identifier: BSL-1.0
// Checks the hand-written backward passes against finite differences; with --dump FILE writes one training run as JSON
// instead, for check_against_torch.py to repeat.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "mlp.hpp"
#include "ops_cpu.hpp"
#include "optimizer.hpp"
#include "transformer.hpp"

namespace {

using namespace gradsync_train;
using Ops = CpuOps;

Batch random_batch(std::size_t sequences, std::size_t length, std::size_t targets, std::uint64_t seed) {
    Random random{seed};
    Batch batch{sequences, length, std::vector<std::uint8_t>(sequences * length), std::vector<std::uint8_t>(targets)};
    for (auto& byte : batch.inputs) byte = static_cast<std::uint8_t>(random.next() % 7 * 31);  // bytes that repeat
    for (auto& byte : batch.targets) byte = static_cast<std::uint8_t>(random.next() % 256);
    return batch;
}

using Tensors = std::vector<std::vector<float>>;

/// Initial weights, which the parameters are bound to.
Tensors own_weights(Parameters& parameters) {
    Tensors weights;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        parameters.initialise(i, 0, weights.emplace_back(parameters[i].count));
        parameters.bind(i, weights[i].data());
    }
    return weights;
}

struct Gradients final : GradientStore {
    explicit Gradients(const Parameters& parameters) : marks(parameters.size()) {
        for (const auto& p : parameters) values.emplace_back(p.count, std::nanf(""));
    }
    float* gradient(std::size_t i) override { return values[i].data(); }
    void ready(std::size_t i) override { ++marks[i]; }

    Tensors values;
    std::vector<std::uint32_t> marks;
};

/// The loss's slope along a random direction, for each parameter tensor on its own: a wrong element anywhere shows.
template <class Model>
int check(const char* title, Model& model, const Batch& batch) {
    auto& parameters = model.parameters();
    // Far from initialisation every path carries signal: no bias or norm is at a special value.
    Random random{7};
    Tensors weights = own_weights(parameters);
    for (auto& value : weights) {
        for (float& x : value) x += static_cast<float>(0.1 * random.normal());
    }
    Gradients gradients{parameters};
    model.forward(batch);
    model.backward(batch, gradients);
    const auto marks = gradients.marks;

    // Another backward pass must overwrite every gradient.
    const Tensors once = gradients.values;
    model.forward(batch);
    model.backward(batch, gradients);

    int failures = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        const auto& p = parameters[i];
        const bool overwritten = gradients.values[i] == once[i];

        auto& value = weights[i];
        const auto original = value;
        std::vector<double> direction(value.size());
        double length = 0, expected = 0;
        for (double& x : direction) {
            x = random.normal();
            length += x * x;
        }
        length = std::sqrt(length);
        for (std::size_t k = 0; k < direction.size(); ++k) expected += direction[k] / length * static_cast<double>(once[i][k]);
        const auto loss_at = [&](double distance) {
            for (std::size_t k = 0; k < direction.size(); ++k) {
                value[k] = static_cast<float>(static_cast<double>(original[k]) + distance * direction[k] / length);
            }
            return model.forward(batch);
        };
        // Fourth-order central difference: the step can be large enough to drown float's rounding.
        const double h = 0.02;
        const double measured = (8.0 * (loss_at(h) - loss_at(-h)) - (loss_at(2 * h) - loss_at(-2 * h))) / (12.0 * h);
        std::copy(original.begin(), original.end(), value.begin());

        const double error = std::abs(measured - expected);
        const bool close = error <= 2e-3 * std::abs(expected) + 1e-5;
        const bool marked = marks[i] == p.uses;
        if (!close || !overwritten || !marked) ++failures;
        std::printf("%-4s %s %-32s slope %+.6f, by differences %+.6f%s%s\n", close && overwritten && marked ? "ok" : "FAIL", title,
                    p.name.c_str(), expected, measured, overwritten ? "" : ", a second pass differs", marked ? "" : ", marks differ");
    }
    return failures;
}

/// Three clipped AdamW steps on random bytes, with everything needed to repeat them.
template <class Model>
nlohmann::json record(Model& model, std::size_t sequences, std::size_t length, std::size_t targets) {
    auto& parameters = model.parameters();
    nlohmann::json run;
    Tensors weights = own_weights(parameters);
    for (std::size_t i = 0; i < parameters.size(); ++i)
        run["parameters"].push_back({{"name", parameters[i].name}, {"shape", parameters[i].shape}, {"initial", weights[i]}});
    Gradients gradients{parameters};
    AdamW<Ops> optimizer{parameters, 0.1};
    optimizer.set_learning_rate(1e-2);
    Tensors first, second;
    for (const auto& p : parameters) {
        first.emplace_back(p.count);
        second.emplace_back(p.count);
    }
    for (std::uint64_t step = 0; step < 3; ++step) {
        const Batch batch = random_batch(sequences, length, targets, 100 + step);
        const double loss = model.forward(batch);
        model.backward(batch, gradients);
        double squares = 0;
        for (const auto& gradient : gradients.values) {
            for (float x : gradient) squares += static_cast<double>(x) * static_cast<double>(x);
        }
        const double norm = std::sqrt(squares);
        optimizer.begin_step();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            float* const state[] = {first[i].data(), second[i].data()};
            optimizer.step({.parameter = i,
                            .value = weights[i],
                            .gradient = gradients.values[i],
                            .gradient_scale = std::min(1.0, 0.5 / norm),
                            .state = state});
        }
        run["batches"].push_back({{"inputs", batch.inputs}, {"targets", batch.targets}, {"loss", loss}, {"norm", norm}});
        if (step == 0) run["gradients"] = gradients.values;
    }
    for (const auto& value : weights) run["final"].push_back(value);
    run["sequences"] = sequences;
    run["length"] = length;
    return run;
}

}  // namespace

int main(int argc, char** argv) {
    Ops::initialise();
    Mlp<Ops> mlp{{.context = 5, .embedding = 8, .hidden = {48, 32}, .sequences = 6, .seed = 1}};
    TransformerConfig config{.width = 32, .blocks = 2, .heads = 4, .context = 70, .sequences = 2, .seed = 1};
    Transformer<Ops> transformer{config};
    config.tied = true;
    config.recompute = true;
    Transformer<Ops> tied{config};

    if (argc == 3 && std::strcmp(argv[1], "--dump") == 0) {
        const nlohmann::json all{{"mlp", record(mlp, 6, 5, 6)},
                                 {"transformer", record(transformer, 2, 70, 140)},
                                 {"tied", record(tied, 2, 70, 140)},
                                 {"heads", 4}};
        std::ofstream file{argv[2]};
        file << all << std::flush;
        if (!file) return std::fprintf(stderr, "cannot write %s\n", argv[2]), 1;
        return 0;
    }
    int failures = check("mlp", mlp, random_batch(6, 5, 6, 3));
    failures += check("transformer", transformer, random_batch(2, 70, 140, 3));
    failures += check("transformer (tied, recomputing)", tied, random_batch(2, 70, 140, 3));
    if (failures > 0) std::printf("%d gradients are wrong\n", failures);
    return failures > 0 ? 1 : 0;
}
