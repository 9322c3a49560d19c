// SPDX-License-Identifier: BSL-1.0
#include <gradsync/compress/error_feedback.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <utility>
#include <vector>

#include <gradsync/compress/power_sgd.hpp>
#include <gradsync/compress/quantizer.hpp>
#include <gradsync/gradsync.hpp>

#include "support/random.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

constexpr std::size_t outputs = 24, inputs = 20;

/// Each rank has observations y = W* x of its own, and learns W by gradient descent: the loss over all ranks after `steps`.
template <class Exchange>
double loss_after(int steps, const Exchange& exchange, bool keeps_residuals = true) {
    constexpr int ranks = 2;
    constexpr std::size_t observations = 60;
    const auto uniform = [](Random& random) { return static_cast<float>(random() % 2001) / 1000 - 1; };
    Random truth(7);
    std::vector<float> target(outputs * inputs);
    for (float& w : target) w = uniform(truth);
    double losses[ranks] = {};
    run_threads(
        ranks,
        [&](ThreadBackend comm) {
            const int rank = comm.rank();
            Random random(100 + static_cast<std::uint64_t>(rank));
            std::vector<float> x(observations * inputs), weights(outputs * inputs), gradient(outputs * inputs);
            for (float& value : x) value = uniform(random);
            const std::vector<ParameterView> parameters{parameter("weights", weights, gradient, {outputs, inputs})};
            Reducer<ThreadBackend, SizeCappedBuckets, OverlapBackward, Exchange> sync(comm, parameters, exchange);
            for (int step = 0;; ++step) {
                double loss = 0;
                gradient.assign(gradient.size(), 0);
                for (std::size_t o = 0; o < observations; ++o)
                    for (std::size_t i = 0; i < outputs; ++i) {
                        float error = 0;
                        for (std::size_t j = 0; j < inputs; ++j)
                            error += (weights[i * inputs + j] - target[i * inputs + j]) * x[o * inputs + j];
                        loss += static_cast<double>(error * error) / observations;
                        for (std::size_t j = 0; j < inputs; ++j) gradient[i * inputs + j] += error * x[o * inputs + j] / observations;
                    }
                if (step == steps) {
                    losses[rank] = loss;
                    return;
                }
                sync.mark_ready(0);
                sync.finish();
                if constexpr (Compressor<Exchange, ThreadBackend>)
                    if (!keeps_residuals) write(sync.exchange().residual(0), Bytes(sync.exchange().residual(0).bytes()));
                for (std::size_t k = 0; k < weights.size(); ++k) weights[k] -= 0.1f * gradient[k];
            }
        },
        patient);
    return losses[0] + losses[1];
}

}  // namespace

TEST_CASE(
    "PyTorch parity: gradient descent with compressed gradients, by PowerSGD too, comes where it comes without, as long as nothing is lost") {
    constexpr int steps = 400;
    const PowerSgd power_sgd{.start_step = 0};
    const Quantizer signs{.bits = 1};
    const double at_first = loss_after(0, AllReduce{}), exact = loss_after(steps, AllReduce{});
    const double low_rank = loss_after(steps, power_sgd), kept = loss_after(steps, signs), lossy = loss_after(steps, signs, false);
    CAPTURE(at_first);
    CAPTURE(exact);
    CAPTURE(lossy);
    CHECK(exact < 1e-3 * at_first);
    CHECK(low_rank < 1e-2 * at_first);
    CHECK(kept < 1e-2 * at_first);
    for (const unsigned bits : {8u, 4u}) {
        CAPTURE(bits);
        CHECK(loss_after(steps, Quantizer{.bits = bits}) < 1e-2 * at_first);
    }
    CHECK(lossy > 5 * kept);
}

TEST_CASE(
    "ErrorFeedback: gradients are added with their scale, what there is counts as much as its weight; a scale of 0 leaves gradients out") {
    std::vector<BucketContents> contents(2);
    contents[0] = {40, DType::bf16, {{2, 0, 7, {}}, {0, 32, 8, {}}}};
    contents[1] = {3000, DType::f32, {{3, 0, 3000, {}}}};
    gradsync::detail::ErrorFeedback feedback;
    feedback.adopt_plan(contents);
    CHECK(feedback.parameter(0).count == 8);
    CHECK(feedback.parameter(1).count == 0);  // it is in no bucket
    CHECK(feedback.parameter(2).count == 7);
    CHECK(feedback.parameter(3).count == 3000);
    CHECK(feedback.parameter(4).count == 0);
    CHECK(feedback.parameter(2).data == feedback.bucket(0));
    CHECK(feedback.parameter(0).data == feedback.bucket(0) + 32);

    std::vector<BFloat16> halves(40, BFloat16(0.5f));
    std::vector<float> floats(3000, 3);
    for (const double scale : {1.0, 0.25, 0.0}) {
        feedback.begin(0, const_buffer(halves), scale, 1);
        feedback.begin(1, const_buffer(floats), scale, 1);
    }
    CHECK(numbers(feedback.parameter(0)) == std::vector<double>(8, 0.625));
    CHECK(numbers(feedback.parameter(3)) == std::vector<double>(3000, 3.75));

    // For a weight of 4 four times as much, and as much as before again afterwards.
    feedback.begin(0, const_buffer(halves), 4, 4);
    CHECK(numbers(feedback.parameter(0)) == std::vector<double>(8, 4 * 0.625 + 4 * 0.5));
    feedback.settle(0, 40, 4);
    CHECK(numbers(feedback.parameter(0)) == std::vector<double>(8, 1.125));
    feedback.begin(0, const_buffer(std::vector<BFloat16>(40, BFloat16(-0.5f))), 1, 1);
    feedback.settle(0, 40, 1);
    CHECK(numbers(feedback.parameter(0)) == std::vector<double>(8, 0.625));

    // A gradient of no weight counts by the last weight, later; there was none before.
    feedback.hold_back(0, const_buffer(halves), 1);
    CHECK(numbers(feedback.parameter(0)) == std::vector<double>(8, 0.625));
    feedback.unit_of({1, 4});
    feedback.hold_back(0, const_buffer(halves), 1);
    CHECK(numbers(feedback.parameter(0)) == std::vector<double>(8, 0.625 + 0.5 / 4));
    feedback.hold_back(0, const_buffer(halves), -1);

    // In another plan, other places: what there was moves along.
    contents = {{3040, DType::f32, {{3, 0, 3000, {}}, {2, 3008, 7, {}}}}, {8, DType::bf16, {{0, 0, 8, {}}}}};
    const auto before = numbers(feedback.parameter(0));
    feedback.adopt_plan(contents);
    CHECK(numbers(feedback.parameter(0)) == before);
    CHECK(numbers(feedback.parameter(2)) == std::vector<double>(7, 0.625));
    CHECK(numbers(feedback.parameter(3)) == std::vector<double>(3000, 3.75));
    CHECK(feedback.bucket(0)[3000] == 0);
    CHECK(feedback.bucket(0)[3015] == 0);

    contents = {{9, DType::f32, {{0, 0, 9, {}}}}};  // another count: another parameter
    feedback.adopt_plan(contents);
    CHECK(numbers(feedback.parameter(0)) == std::vector<double>(9));
    CHECK(feedback.parameter(3).count == 0);
}

TEST_CASE("ErrorFeedback: what there is counts by the rank's weight, or, where only others ever have any, by its scale") {
    gradsync::detail::ErrorFeedback feedback;
    CHECK(feedback.unit_of({1, 0}) == 1);  // of a sum
    CHECK(feedback.unit_of({0, 0}) == 0);
    CHECK(feedback.unit_of({0, 1}) == 1);  // no batch, but in the divisor
    CHECK(feedback.unit_of({1, 4096}) == 4096);
    CHECK(feedback.unit_of({1, 0}) == 0);  // a batch without tokens
    CHECK(feedback.unit_of({0, 0}) == 0);  // none
    CHECK(feedback.unit_of({8, 8}) == 8);
}
