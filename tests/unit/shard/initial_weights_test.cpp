// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <memory>
#include <utility>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "sharded_training.hpp"

using namespace gradsync;
using namespace gradsync_test;

TEST_CASE("weights come from the root") {
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              for (const ParameterStorage storage : {ParameterStorage::borrowed, ParameterStorage::in_buckets}) {
                  auto model = initial_tensors({100, 7, 300}, DType::bf16);
                  model[1].requires_grad = false;
                  const auto expected = model;
                  if (comm.rank() != 1)
                      for (Tensor& p : model) p.value = constant_bytes(p.dtype, p.count(), comm.rank());
                  ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, model, Sgd{}, {.parameters = storage});
                  sharded.broadcast_parameters(1);
                  for (std::size_t i = 0; i < model.size(); ++i)
                      finding.check(holds(sharded.parameter_value(i), expected[i].value), model[i].name + " is not the root's");
              }
          }) == "");
}

TEST_CASE("weights that live in the buckets need no memory of the trainer's, not even at first") {
    const Training t;
    const std::vector<Bytes> expected = weights_of_whole(3, t, AdamW{{0.01, 0.02}});
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors(t.counts, t.dtype);
              std::vector<ParameterView> views;
              for (Tensor& p : model)
                  views.push_back(
                      {.name = p.name, .value = {nullptr, p.count(), p.dtype}, .gradient = p.gradient_view(), .may_be_empty = true});
              ShardedOptimizer<ThreadBackend, AdamW, Zero1, Flat, OverlapBackward> sharded(comm, views, AdamW{{0.01, 0.02}},
                                                                                           {.parameters = ParameterStorage::in_buckets});
              for (std::size_t i = 0; i < model.size(); ++i) {
                  finding.check(holds(sharded.parameter_value(i), Bytes(model[i].value.size())), model[i].name + " is not zero");
                  if (comm.rank() == 0) kernel::copy(model[i].value_view(), sharded.parameter_value(i));
              }
              sharded.adopt_values();
              sharded.broadcast_parameters();
              train_sharded(sharded, t);
              finding.check(first_difference(expected, weights(sharded)).empty(),
                            first_difference(expected, weights(sharded)) + " differs");
          }) == "");
}

TEST_CASE("weights that are copied may differ between ranks, be shared by them, or go, before the root's are broadcast") {
    std::vector<float> shared(50, 3.0f);
    const auto check = [&](auto make) {
        return findings(3, [&](ThreadBackend comm, Finding& finding) {
            auto model = std::make_unique<std::vector<Tensor>>(initial_tensors({50}, DType::f32));
            write((*model)[0].value_view(), constant_bytes(DType::f32, 50, comm.rank()));
            std::vector<ParameterView> views = {parameter_view((*model)[0])};
            views.push_back({.name = "shared", .value = buffer(shared), .gradient = {nullptr, 50, DType::f32}});
            views[0].gradient.data = nullptr;
            auto sharded = make(comm, views);
            sharded->broadcast_parameters();
            model.reset();
            for (int s = 0; s < 2; ++s) {
                for (std::size_t i = 2; i-- > 0;) {
                    write(sharded->acquire_gradient(i), constant_bytes(DType::f32, 50, 0));
                    sharded->mark_ready(i);
                }
                sharded->finish();
                sharded->step();
            }
            finding.check(sharded->statistics().steps == 2, "no steps");
        });
    };
    using Whole = ShardedOptimizer<ThreadBackend, Sgd>;
    using Parts = ShardedParameters<ThreadBackend, Sgd>;
    CHECK(check([](ThreadBackend comm, auto& views) {
              return std::make_unique<Whole>(
                  comm, views, Sgd{},
                  ShardingOptions{.reducer = {.gradients = GradientStorage::in_buckets}, .parameters = ParameterStorage::in_buckets});
          }) == "");
    CHECK(check([](ThreadBackend comm, auto& views) { return std::make_unique<Parts>(comm, views, Sgd{}, Units({0, 1})); }) == "");
}

namespace {

/// The outcome of a step on two ranks whose weights differ, with no broadcast. If it `publishes`, all ranks get those of the shards' owners.
template <class Make>
void check_without_broadcast(std::size_t every, bool publishes, Make&& make) {
    const auto seen = outcomes(2, [&](ThreadBackend comm) {
        auto model = initial_tensors({30, 40}, DType::f32);
        write(model[1].value_view(), constant_bytes(DType::f32, 40, comm.rank()));
        auto sharded = make(comm, model, ReducerOptions{.compare_weights_every = every});
        if (publishes) sharded->publish();
        for (std::size_t i = 2; i-- > 0;) {
            write(sharded->acquire_gradient(i), constant_bytes(DType::f32, model[i].count(), 0));
            sharded->mark_ready(i);
        }
        sharded->finish();
        sharded->step();
    });
    const bool expected = every != never && !publishes;
    for (const Outcome& outcome : seen) {
        INFO(outcome.text);
        CHECK(outcome.is(Errc::parameter_mismatch) == expected);
        CHECK(outcome.says("call broadcast_parameters() before the first step") == expected);
        CHECK(outcome.text.empty() == !expected);
    }
}

}  // namespace

TEST_CASE("weights that live with the library, and that differ between ranks, are found in the first finish()") {
    using InBuckets = ShardedOptimizer<ThreadBackend, Sgd>;
    using Parts = ShardedParameters<ThreadBackend, Sgd>;
    for (const auto& [every, publishes] : {std::pair(std::size_t{0}, false), std::pair(never, false), std::pair(std::size_t{0}, true)}) {
        check_without_broadcast(every, publishes, [](ThreadBackend comm, auto& model, const ReducerOptions& options) {
            return std::make_unique<InBuckets>(comm, model, Sgd{},
                                               ShardingOptions{.reducer = options, .parameters = ParameterStorage::in_buckets});
        });
        check_without_broadcast(every, publishes, [](ThreadBackend comm, auto& model, const ReducerOptions& options) {
            return std::make_unique<Parts>(comm, model, Sgd{}, Units({0, 1}), ShardedParametersOptions{.reducer = options});
        });
    }
}

TEST_CASE("ranks with equal weights need no broadcast, even if one has no batch or leaves a gradient unused in the first step") {
    for (const bool finds_unused : {false, true})
        for (const bool stage3 : {false, true})
            CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
                      auto model = initial_tensors({30, 40, 50}, DType::f32);
                      model[2].requires_grad = false;  // its memory is filled later
                      write(model[2].value_view(), constant_bytes(DType::f32, 50, comm.rank()));
                      const ReducerOptions options{.unused = finds_unused ? UnusedParameters::find_unused : UnusedParameters::error};
                      const bool is_second = comm.rank() == 1;
                      const auto step = [&](auto&& sharded) {
                          write(model[2].value_view(), constant_bytes(DType::f32, 50, 3));
                          if (!finds_unused) (void)sharded.begin_step(!is_second);
                          for (std::size_t i = 2; i-- > (finds_unused && is_second ? 1u : 0u);) {
                              if (!finds_unused && is_second) break;
                              write(sharded.acquire_gradient(i), constant_bytes(DType::f32, model[i].count(), 1));
                              sharded.mark_ready(i);
                          }
                          sharded.finish();
                          sharded.step();
                          finding.check(sharded.statistics().steps == 1, "no step");
                      };
                      if (stage3)
                          step(ShardedParameters(comm, model, Sgd{}, Units({0, 1, 1}), ShardedParametersOptions{.reducer = options}));
                      else
                          step(ShardedOptimizer<ThreadBackend, Sgd>(
                              comm, model, Sgd{}, ShardingOptions{.reducer = options, .parameters = ParameterStorage::in_buckets}));
                  }) == "");
}
