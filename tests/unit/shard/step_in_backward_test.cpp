// SPDX-License-Identifier: BSL-1.0
// The optimizer inside the reduction, in the backward: the bits of stage 2, in less memory.
#include <doctest/doctest.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include "step_inside.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// Trains with stage 2, and with its steps in the backward. Returns what differs.
std::string difference_in_backward(int ranks, const How& how) {
    return findings(ranks, [&](ThreadBackend comm, Finding& finding) {
        const Trained expected = train_as(comm, how, Zero2{}), inside = train_as(comm, how, StepInBackward{});
        finding.check(first_difference(expected.weights, inside.weights).empty(),
                      first_difference(expected.weights, inside.weights) + " differs");
        finding.check(comm.size() == 1 || inside.collectives.back() == 1, "other collectives");
    });
}

}  // namespace

TEST_CASE("StepInBackward has the bits of stage 2") {
    How how, weighing, thawing;
    weighing.weighs = true;
    weighing.training.reducer.averaging = Averaging::weighted_mean;
    thawing.thaws = true;
    for (const int ranks : rank_counts()) {
        CAPTURE(ranks);
        for (const auto parameters : {ParameterStorage::in_buckets, ParameterStorage::borrowed}) {
            how.parameters = weighing.parameters = thawing.parameters = parameters;
            CHECK(difference_in_backward(ranks, how) == "");
            CHECK(difference_in_backward(ranks, weighing) == "");
            CHECK(difference_in_backward(ranks, thawing) == "");
        }
        How other;
        other.training.dtype = ranks % 2 == 0 ? DType::bf16 : DType::f64;
        CHECK(difference_in_backward(ranks, other) == "");
    }
}

TEST_CASE("StepInBackward needs the memory of a few buckets for gradients") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              constexpr std::size_t layers = 16, count = 5000;
              std::vector<std::vector<float>> w(layers, std::vector<float>(count));
              std::vector<ParameterView> views;
              for (std::size_t i = 0; i < layers; ++i) views.push_back({.name = "w" + std::to_string(i), .value = buffer(w[i])});
              ShardedOptimizer sharded(comm, views, Sgd{}, StepInBackward{}, PerParameter{});
              for (int step = 0; step < 3; ++step) {
                  for (std::size_t i = layers; i-- > 0;) {
                      for (float& g : sharded.acquire_gradient(i).as<float>()) g = 1;
                      sharded.mark_ready(i);
                  }
                  sharded.finish();
                  sharded.step();
              }
              const std::size_t gradients = sharded.memory().gradients;
              finding.check(gradients <= layers * count * sizeof(float) / 4, std::to_string(gradients));
              finding.check(w[3][7] < -0.2f, "not trained");
          }) == "");
}

TEST_CASE("StepInBackward refuses norms, gradient scales, micro-batches and discard()") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              std::vector<float> w(100);
              const std::vector<ParameterView> views{{.name = "w", .value = buffer(w)}};
              const auto refused = [&](const ReducerOptions& options) {
                  const Outcome o =
                      outcome_of([&] { ShardedOptimizer(comm, views, Sgd{}, StepInBackward{}, ShardingOptions{.reducer = options}); });
                  finding.check(o.is(Errc::invalid_argument) && o.says("a step has one micro-batch, and uses every parameter"), o.text);
              };
              refused({.unused = UnusedParameters::find_unused});
              for (const std::size_t micro_batches : {2u, 4u})
                  refused({.accumulation = Accumulation::in_buckets, .micro_batches = micro_batches});
              ShardedOptimizer sharded(comm, views, Sgd{}, StepInBackward{});
              sharded.acquire_gradient(0).as<float>()[0] = 1;
              sharded.mark_ready(0);
              sharded.finish();
              finding.check(outcome_of([&] { (void)sharded.gradient_norm(); }).says("stepped in the backward"), "a norm");
              finding.check(outcome_of([&] { sharded.discard(); }).says("stepped in the backward"), "discard");
              finding.check(outcome_of([&] { sharded.step(0.5); }).says("with a gradient scale of 1"), "a scale");
              sharded.step();
          }) == "");
}

TEST_CASE("StepInBackward refuses micro_batches and find_unused on any number of ranks") {
    for (const int ranks : {1, 2, 3})
        CHECK(findings(ranks, [](ThreadBackend comm, Finding& finding) {
                  std::vector<float> w(100);
                  const std::vector<ParameterView> views{{.name = "w", .value = buffer(w)}};
                  const auto micro_batches = static_cast<std::size_t>(comm.size());
                  for (const ReducerOptions& options :
                       {ReducerOptions{.unused = UnusedParameters::find_unused}, ReducerOptions{.micro_batches = micro_batches},
                        ReducerOptions{.accumulation = Accumulation::in_buckets, .micro_batches = 2 * micro_batches}}) {
                      const Outcome o =
                          outcome_of([&] { ShardedOptimizer(comm, views, Sgd{}, StepInBackward{}, ShardingOptions{.reducer = options}); });
                      finding.check(
                          o.is(Errc::invalid_argument) && o.says("ShardedOptimizer on rank") && o.says("with StepInBackward a step has"),
                          o.text);
                  }
              }) == "");
}

TEST_CASE("a rank that leaves in the middle of a backward with steps inside is blamed, and nobody writes to its memory then") {
    for (int round = 0; round < 20; ++round) {
        const auto seen = outcomes(2, [&](ThreadBackend comm) {
            std::vector<std::vector<float>> w(2, std::vector<float>(100000));
            std::vector<ParameterView> views;
            for (std::size_t i = 0; i < w.size(); ++i) views.push_back({.name = "w" + std::to_string(i), .value = buffer(w[i])});
            ShardedOptimizer sharded(comm, views, Sgd{}, StepInBackward{}, PerParameter{});
            (void)sharded.acquire_gradient(1).as<float>();
            sharded.mark_ready(1);
            if (comm.rank() == 1) throw std::runtime_error("no more");
            (void)sharded.acquire_gradient(0);
            sharded.mark_ready(0);
            sharded.finish();
        });
        CHECK(seen[1].says("no more"));
        CHECK(seen[0].is(Errc::peer_failed));
        CHECK(seen[0].says("rank 1"));
    }
}
