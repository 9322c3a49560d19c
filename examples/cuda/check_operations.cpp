// SPDX-License-Identifier: BSL-1.0
// Compares the operations on a device with those on the CPU: one by one, over shapes that fit nothing, and in a training of
// each model, whose losses have to agree. Exit code 77: there is no device.
//
// usage: check_operations_cuda [--small] [--no-trainings]      --small: fewer and smaller shapes, for a device that is slow

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gradsync/interop/pointer.hpp>

#include "../mlp.hpp"
#include "../ops_cpu.hpp"
#include "../transformer.hpp"
#include "adamw.hpp"
#include "device.hpp"
#include "ops_cuda.hpp"

namespace {

using namespace gradsync_train;
using Size = std::size_t;

/// One side of a comparison: what an operation is given, the same on both, and what it makes of it.
template <class Ops>
class Side {
public:
    explicit Side(Ops ops_) : ops{ops_} {}

    using Factor = typename Ops::Factor;

    /// The same numbers on both sides, as they are asked for in the same order.
    float* random(Size n, double deviation = 1.0) { return array(arrays_, ops.floats(n), n, drawn(deviation)); }
    /// The same as factors; what rounds them rounds them.
    Factor* random_factors(Size n, double deviation = 1.0) { return array(factors_, ops.factors(n), n, drawn(deviation)); }
    /// What is not overwritten shows.
    float* output(Size n) { return array(arrays_, ops.floats(n), n, unwritten); }
    Factor* output_factors(Size n) { return array(factors_, ops.factors(n), n, unwritten); }
    /// 0, distance, 2 distance ...
    const std::uint8_t* bytes(Size n, unsigned different, unsigned distance) {
        auto& batch = batches_.emplace_back(n);
        for (auto& byte : batch) byte = static_cast<std::uint8_t>(random_.next() % different * distance);
        return ops.load(batch, rooms_.emplace_back(ops.bytes(n)));
    }
    /// Of numbers or factors.
    template <class T>
    void result(const char* name, Size n, const T* data) {
        std::vector<float> own;
        const std::span values = ops.read(n, data, own);
        results.push_back({name, {values.begin(), values.end()}});
    }

    Ops ops;
    struct Result {
        const char* name;
        std::vector<float> values;
    };
    std::vector<Result> results;

private:
    template <class Arrays, class Array, class Fill>
    auto* array(Arrays& arrays, Array&& made, Size n, Fill&& fill) {
        auto* const data = arrays.emplace_back(std::move(made)).data();
        ops.write(n, data, fill);
        return data;
    }
    auto drawn(double deviation) {
        return [this, deviation](std::span<float> out) {
            for (float& x : out) x = static_cast<float>(deviation * random_.normal());
        };
    }
    static void unwritten(std::span<float> out) { std::fill(out.begin(), out.end(), std::nanf("")); }

    Random random_{3};
    std::deque<typename Ops::Floats> arrays_;
    std::deque<typename Ops::Factors> factors_;
    std::deque<std::vector<std::uint8_t>> batches_;
    std::deque<typename Ops::Bytes> rooms_;
};

/// The larger one; a NaN is larger than everything.
double worse(double a, double b) { return std::isnan(a) || b <= a ? a : b; }

/// Keeps count of what differs.
class Comparison {
public:
    explicit Comparison(Precision precision) : device_{precision}, exact_{precision == Precision::f32}, title_{exact_ ? "f32" : "bf16"} {}

    /// `operation(side)` on both sides; the largest difference, relative to the largest number, must not be above the limit.
    /// `factors`: some of the arrays are.
    template <class Operation>
    void operator()(const std::string& name, bool factors, Operation&& operation) {
        Side<CpuOps> expected{CpuOps{}};
        Side<CudaOps> found{device_};
        operation(expected);
        operation(found);
        for (Size i = 0; i < expected.results.size(); ++i) {
            const auto& e = expected.results[i].values;
            const auto& f = found.results[i].values;
            double largest = 1e-6, error = 0;
            for (Size k = 0; k < e.size(); ++k) {
                const auto difference = std::abs(static_cast<double>(e[k]) - static_cast<double>(f[k]));
                largest = std::max(largest, std::abs(static_cast<double>(e[k])));
                error = worse(error, difference);
            }
            report(name + ", " + expected.results[i].name, error / largest, factors && !exact_ ? 2e-2 : 2e-5);
        }
    }

    void report(const std::string& what, double error, double limit) {
        const bool good = error <= limit;
        if (!good) ++failures_;
        std::printf("%-4s %-4s %-60s %.1e (limit %.0e)\n", good ? "ok" : "FAIL", title_, what.c_str(), error, limit);
    }

    CudaOps device() const { return device_; }
    bool exact() const { return exact_; }
    int failures() const { return failures_; }

private:
    CudaOps device_;
    bool exact_;
    const char* title_;
    int failures_ = 0;
};

struct Matrices {
    Size rows, in, out;
};

std::string text(Size a, Size b) { return " " + std::to_string(a) + " x " + std::to_string(b); }

void compare_layers(Comparison& compare, Matrices m) {
    const auto [n, in, out] = m;
    const std::string shape = " " + std::to_string(n) + " x " + std::to_string(in) + " -> " + std::to_string(out);
    compare("linear" + shape, true, [&](auto& s) {
        auto *x = s.random_factors(n * in), *dy = s.random_factors(n * out);
        float *weights = s.random(out * in), *bias = s.random(out + 1) + 1, *residual = s.random(n * out);
        auto room = s.ops.rounding(out * in);
        const auto* const weight = s.ops.as_factors(out * in, weights, room);
        float *y = s.output(n * out), *biased = s.output(n * out), *sum = s.output(n * out), *dweight = s.output(out * in);
        auto *y_factors = s.output_factors(n * out), *biased_factors = s.output_factors(n * out), *dx = s.output_factors(n * in);
        s.ops.linear(n, in, out, x, weight, nullptr, nullptr, y);
        s.ops.linear(n, in, out, x, weight, bias, nullptr, biased);
        s.ops.linear(n, in, out, x, weight, bias, residual, sum);
        s.ops.linear(n, in, out, x, weight, nullptr, nullptr, y_factors);
        s.ops.linear(n, in, out, x, weight, bias, nullptr, biased_factors);
        s.ops.linear_input_gradient(n, in, out, dy, weight, dx);
        s.ops.linear_weight_gradient(n, in, out, dy, x, dweight);
        s.result("y", n * out, y);
        s.result("y with a bias", n * out, biased);
        s.result("y with a bias and a residual", n * out, sum);
        s.result("y, factors", n * out, y_factors);
        s.result("y with a bias, factors", n * out, biased_factors);
        s.result("dx", n * in, dx);
        s.result("dweight", out * in, dweight);
        s.result("weights as factors", out * in, s.ops.rounded(weights, room));
    });
    compare("sums" + text(n, out), true, [&](auto& s) {
        float *sums = s.output(out), *sums_of_factors = s.output(out);
        s.ops.column_sum(n, out, s.random(n * out), sums);
        s.ops.column_sum(n, out, s.random_factors(n * out), sums_of_factors);
        s.result("of numbers", out, sums);
        s.result("of factors", out, sums_of_factors);
    });
    compare("gelu" + text(n, out), true, [&](auto& s) {
        auto *x = s.random_factors(n * out, 3), *y = s.output_factors(n * out), *dy = s.random_factors(n * out);
        float *bias = s.random(out + 1) + 1, *dbias = s.output(out);
        s.ops.bias_gelu(n, out, bias, x, y);
        s.ops.bias_gelu_backward(n, out, bias, x, dy, dbias);
        s.result("y", n * out, y);
        s.result("dx", n * out, dy);
        s.result("dbias", out, dbias);
    });
    if (!compare.exact()) return;  // the rest has nothing to do with precision
    compare("elements" + text(n, out), false, [&](auto& s) {
        float *x = s.random(n * out), *y = s.random(n * out);
        s.ops.add(n * out, x, y);
        s.result("y", n * out, y);
        s.ops.fill(n * out, 3.0f, y);
        s.result("filled", n * out, y);
    });
}

/// Compares operations that work row by row. `odd`: parameters begin this many numbers after an aligned address.
void compare_rows(Comparison& compare, Size n, Size columns, Size odd) {
    compare("layer norm" + text(n, columns), true, [&](auto& s) {
        if (columns == 1) return;  // nothing but rounding errors
        float *x = s.random(n * columns, 2), *dx = s.random(n * columns);
        float *gain = s.random(columns + odd) + odd, *bias = s.random(columns + odd) + odd;
        auto *dy = s.random_factors(n * columns), *y = s.output_factors(n * columns);
        float *mean = s.output(n), *inverse = s.output(n), *dgain = s.output(columns), *dbias = s.output(columns);
        float* const sums = s.output(columns);
        auto room = s.ops.rounding(n * columns);
        s.ops.layer_norm(n, columns, x, gain, bias, y, mean, inverse);
        s.ops.layer_norm_backward_add(n, columns, x, gain, mean, inverse, dy, dx, room, dgain, dbias, sums);
        s.result("y", n * columns, y);
        s.result("mean", n, mean);
        s.result("inverse", n, inverse);
        s.result("dx", n * columns, dx);
        s.result("dx, factors", n * columns, s.ops.rounded(dx, room));
        s.result("dgain", columns, dgain);
        s.result("dbias", columns, dbias);
        s.result("sums", columns, sums);
    });
    compare("cross entropy" + text(n, columns), true, [&](auto& s) {
        float* logits = s.random(n * columns, 4);
        auto room = s.ops.rounding(n * columns);
        const auto* const targets = s.bytes(n, static_cast<unsigned>(std::min<Size>(columns, 256)), 1);
        const auto value = static_cast<float>(s.ops.value(s.ops.cross_entropy(n, columns, targets, logits, room)));
        s.results.push_back({"loss", {value}});
        s.result("dlogits", n * columns, logits);
        s.result("dlogits, factors", n * columns, s.ops.rounded(logits, room));
    });
}

void compare_ends(Comparison& compare, Size sequences, Size length, Size width) {
    const Size tokens = sequences * length;
    compare("embedding" + text(tokens, width), true, [&](auto& s) {
        const auto* bytes = s.bytes(tokens, 7, 36);
        float *table = s.random(256 * width), *positions = s.random(length * width);
        auto *factors = s.output_factors(tokens * width), *dfactors = s.random_factors(tokens * width);
        float *out = s.output(tokens * width), *plain = s.output(tokens * width);
        float *dtable = s.random(256 * width), *dpositions = s.output(length * width);
        s.ops.embed(tokens, length, width, bytes, table, positions, out);
        s.ops.embed(tokens, length, width, bytes, table, nullptr, plain);
        s.ops.embed(tokens, length, width, bytes, table, nullptr, factors);
        s.ops.embed_backward_add(tokens, width, bytes, dfactors, dtable);
        s.ops.positions_backward(tokens, length, width, s.random(tokens * width), dpositions);
        s.result("out", tokens * width, out);
        s.result("without positions", tokens * width, plain);
        s.result("factors", tokens * width, factors);
        s.result("dtable", 256 * width, dtable);
        s.result("dpositions", length * width, dpositions);
    });
}

void compare_attention(Comparison& compare, AttentionShape shape) {
    const Size tokens = shape.sequences * shape.length, width = shape.width();
    const std::string name = "attention " + std::to_string(shape.sequences) + " x " + std::to_string(shape.length) + ", " +
                             std::to_string(shape.heads) + " heads of " + std::to_string(shape.head_size);
    compare(name, true, [&](auto& s) {
        auto *qkv = s.random_factors(tokens * 3 * width), *dout = s.random_factors(tokens * width);
        auto *out = s.output_factors(tokens * width), *dqkv = s.output_factors(tokens * 3 * width);
        float *sums = s.output(3 * width), *kept = s.output(s.ops.attention_memory(shape)),
              *scratch = s.output(s.ops.attention_scratch(shape));
        s.ops.attention(shape, qkv, kept, out);
        s.ops.attention_backward(shape, qkv, kept, out, dout, dqkv, sums, scratch);
        s.result("out", tokens * width, out);
        s.result("dqkv", tokens * 3 * width, dqkv);
        s.result("sums of dqkv", 3 * width, sums);
    });
}

/// By which gradients of several arrays are scaled, as the host would find.
void compare_clipping(Comparison& compare, Size largest) {
    Side<CudaOps> side{compare.device()};
    std::vector<gradsync::ConstBufferView> gradients;
    double squares = 0;
    for (const Size n : {Size{1}, Size{77}, largest}) {
        const float* const gradient = side.random(n);
        gradients.push_back(gradsync::device_buffer(gradient, n));
        std::vector<float> own;
        for (const float x : side.ops.read(n, gradient, own)) squares += static_cast<double>(x) * static_cast<double>(x);
    }
    for (const double most : {0.25, 1e6, 0.5}) {
        std::vector<float> own;
        const double found = static_cast<double>(side.ops.read(1, side.ops.clip_factor(gradients, most), own)[0]);
        const double expected = std::min(1.0, most / std::sqrt(squares));
        compare.report("clip factor for " + std::to_string(most), std::abs(found - expected) / expected, 1e-6);
    }
}

// ---- trainings

Batch random_batch(Size sequences, Reading reading, std::uint64_t seed) {
    Random random{seed};
    Batch batch{sequences, reading.length, std::vector<std::uint8_t>(sequences * reading.length),
                std::vector<std::uint8_t>(sequences * reading.targets)};
    for (auto& byte : batch.inputs) byte = static_cast<std::uint8_t>(random.next() % 7 * 31);  // bytes that repeat
    for (auto& byte : batch.targets) byte = static_cast<std::uint8_t>(random.next() % 16);
    return batch;
}

template <class Ops>
struct Gradients final : GradientStore {
    Gradients(const Parameters& parameters, Ops ops) {
        for (const auto& p : parameters) values.push_back(ops.floats(p.count));
    }
    float* gradient(Size i) override { return values[i].data(); }
    void ready(Size) override {}

    std::vector<typename Ops::Floats> values;
};

struct Training {
    std::vector<double> losses;  // by micro-batch
    std::vector<float> weights;  // all, at the end
};

/// Steps of two micro-batches each, clipped.
template <class Model, class Ops>
Training train(Ops ops, const typename Model::Config& config, unsigned steps) {
    Model model{config, ops};
    auto& parameters = model.parameters();
    std::vector<typename Ops::Floats> weights, first, second;
    for (Size i = 0; i < parameters.size(); ++i) {
        const Size n = parameters[i].count;
        weights.push_back(ops.floats(n));
        first.push_back(ops.floats(n));
        second.push_back(ops.floats(n));
        ops.write(n, weights[i].data(), [&](std::span<float> out) { parameters.initialise(i, 0, out); });
        parameters.bind(i, weights[i].data());
    }
    Gradients<Ops> gradients{parameters, ops};
    Gradients<Ops> second_micro_batch{parameters, ops};
    AdamW<Ops> optimizer{parameters, 0.1};
    optimizer.set_learning_rate(1e-2);

    std::vector<typename Ops::Loss> all;
    for (unsigned step = 0; step < steps; ++step) {
        for (unsigned a = 0; a < 2; ++a) {
            const Batch batch = random_batch(config.sequences, config.reading(), step * 2 + a);
            all.push_back(model.forward(batch));
            model.backward(batch, a == 0 ? gradients : second_micro_batch);
        }
        for (Size i = 0; i < parameters.size(); ++i)
            ops.add(parameters[i].count, second_micro_batch.values[i].data(), gradients.values[i].data());
        optimizer.begin_step();
        if constexpr (Ops::on_device) {
            std::vector<std::array<void*, 2>> states;
            for (Size i = 0; i < parameters.size(); ++i) states.push_back({first[i].data(), second[i].data()});
            std::vector<gradsync::DeviceSlice> slices;
            std::vector<gradsync::ConstBufferView> views;
            for (Size i = 0; i < parameters.size(); ++i) {
                views.push_back(gradsync::device_buffer(gradients.values[i].data(), gradients.values[i].size()));
                slices.push_back({.parameter = i,
                                  .master = gradsync::device_buffer(weights[i].data(), weights[i].size()),
                                  .gradient = views[i],
                                  .state = states[i]});
            }
            optimizer.scale_gradients_by(ops.clip_factor(views, 1.0));
            optimizer.step(slices, 1, ops.stream());
        } else {
            double squares = 0;
            for (const auto& gradient : gradients.values)
                for (const float x : gradient) squares += static_cast<double>(x) * static_cast<double>(x);
            for (Size i = 0; i < parameters.size(); ++i) {
                float* const state[] = {first[i].data(), second[i].data()};
                optimizer.step({.parameter = i,
                                .value = {weights[i].data(), weights[i].size()},
                                .gradient = gradients.values[i],
                                .gradient_scale = std::min(1.0, 1.0 / std::sqrt(squares)),
                                .state = state});
            }
        }
    }
    Training result;
    for (const auto& loss : all) result.losses.push_back(ops.value(loss));
    for (const auto& array : weights) {
        std::vector<float> own;
        const std::span values = ops.read(array.size(), array.data(), own);
        result.weights.insert(result.weights.end(), values.begin(), values.end());
    }
    return result;
}

template <template <class> class Model>
void compare_training(Comparison& compare, const char* name, const typename Model<CpuOps>::Config& config, unsigned steps) {
    const Training expected = train<Model<CpuOps>>(CpuOps{}, config, steps);
    const Training found = train<Model<CudaOps>>(compare.device(), config, steps);
    double worst = 0;
    for (Size i = 0; i < expected.losses.size(); ++i) {
        const double difference = std::abs(expected.losses[i] - found.losses[i]);
        worst = worse(worst, difference);
    }
    compare.report("losses of " + std::to_string(steps) + " steps, " + name, worst, compare.exact() ? 1e-4 : 5e-2);
    if (!(expected.losses.back() < expected.losses.front())) compare.report(std::string(name) + " has not learnt", 1, 0);
    // The same once more has to give the same bits.
    const Training again = train<Model<CudaOps>>(compare.device(), config, steps);
    compare.report(std::string("bits of the same training again, ") + name, again.weights == found.weights ? 0 : 1, 0);
}

int compare_all(Precision precision, bool small, bool trainings) {
    Comparison compare{precision};
    const Size factor = small ? 1 : 8;
    for (const Matrices m :
         {Matrices{1, 1, 1}, Matrices{3, 5, 2}, Matrices{40, 33, 67}, Matrices{70 * factor, 16, 256}, Matrices{9, 8, 300 * factor}})
        compare_layers(compare, m);
    // Rows that are kept as a whole and those that are not, in packs and not; more rows than one block takes.
    for (const auto [rows, columns, odd] : {std::array<Size, 3>{1, 1, 0},
                                            {3, 2, 0},
                                            {40, 67, 0},
                                            {70 * factor, 256, 0},
                                            {9, 768, 0},
                                            {5, 256, 0},
                                            {5, 257, 0},
                                            {7, 523, 0},
                                            {6, 768, 1},
                                            {33, 1024, 0},
                                            {5, 1028, 0},
                                            {9, 3076, 0},
                                            {6, 4096, 0},
                                            {3, 4100, 0},
                                            {8200, 5, 0}})
        compare_rows(compare, rows, columns, odd);
    Random random{precision == Precision::f32 ? 5u : 6u};
    for (int i = 0; i < (small ? 2 : 20); ++i) {
        const auto any = [&](Size most) { return 1 + random.next() % most; };
        compare_layers(compare, {any(50 * factor), any(40 * factor), any(40 * factor)});
        compare_rows(compare, any(50 * factor), 3 + any(200 * factor), 0);
        compare_attention(compare, {any(3), any(20 * factor), any(4), any(5 * factor)});
    }
    for (const Size head : {8, 16, 24, 32, 40, 64, 97, 130}) compare_attention(compare, {2, 70, 2, head});
    compare_attention(compare, {1, 130, 2, 128});
    compare_attention(compare, {1, 230, 1, 64});  // several tiles in turn
    compare_attention(compare, {1, 1, 1, 1});
    compare_ends(compare, 3, 100, 5);
    compare_ends(compare, 2, 33 * factor, 40 * factor);
    compare_ends(compare, 1, 1, 1);
    if (compare.exact()) {
        compare_clipping(compare, small ? 70'000 : 3'000'000);
    }
    if (!trainings) return compare.failures();
    const unsigned steps = small ? 4 : 20;
    TransformerConfig transformer{.width = 8 * factor, .blocks = 2, .heads = 2, .context = 12 * factor, .sequences = 2, .seed = 1};
    compare_training<Transformer>(compare, "transformer", transformer, steps);
    transformer.tied = transformer.recompute = true;
    compare_training<Transformer>(compare, "tied transformer", transformer, steps);
    compare_training<Mlp>(compare, "mlp", {.context = 5, .embedding = 8, .hidden = {24 * factor, 20}, .sequences = 6, .seed = 1}, steps);
    return compare.failures();
}

}  // namespace

int main(int argc, char** argv) {
    if (const std::string missing = why_no_device(); !missing.empty()) {
        std::printf("skipped: %s\n", missing.c_str());
        return 77;
    }
    CpuOps::initialise();
    const std::span flags(argv + 1, argv + argc);
    const auto has = [&](const char* flag) {
        return std::any_of(flags.begin(), flags.end(), [&](const char* given) { return std::strcmp(given, flag) == 0; });
    };
    int failures = 0;
    for (const Precision precision : {Precision::f32, Precision::bf16})
        failures += compare_all(precision, has("--small"), !has("--no-trainings"));
    if (failures > 0) std::printf("%d comparisons failed\n", failures);
    return failures > 0 ? 1 : 0;
}
