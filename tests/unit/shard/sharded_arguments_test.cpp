// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/sharding.hpp"

using namespace gradsync;
using namespace gradsync_test;

TEST_CASE("a type that the optimizer cannot step, pooled gradients in stage 1 and parameters without a value are refused") {
    const auto says = [](auto&& f) { return outcomes(1, f)[0].text; };
    const auto model_of = [] { return initial_tensors({10, 20}, DType::f32); };
    CHECK(says([&](ThreadBackend comm) {
              auto model = initial_tensors({10}, DType::f64);
              ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, model, Sgd{});
          }) == "ShardedOptimizer on rank 0: parameter 'p0' is f64, and the optimizer has no step(OptimizerSlice<double>)");
    CHECK(says([&](ThreadBackend comm) {
              auto model = initial_tensors({10, 20}, DType::f64);
              model[0].requires_grad = model[1].requires_grad = false;
              ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, model, Sgd{});
              const std::size_t which[] = {1};
              sharded.unfreeze(which);
          }) == "ShardedOptimizer on rank 0: parameter 'p1' is f64, and the optimizer has no step(OptimizerSlice<double>)");
    CHECK(says([&](ThreadBackend comm) {
              auto model = model_of();
              ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, model, Sgd{}, {.reducer = {.gradients = GradientStorage::pooled}});
          }) == "ShardedOptimizer on rank 0: pooled gradients are for stage 2: write Zero2");
    CHECK(says([&](ThreadBackend comm) {
              std::vector<float> gradient(5);
              std::vector<ParameterView> views = {{.name = "w", .gradient = buffer(gradient)}};
              ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, views, Sgd{});
          }) == "ShardedOptimizer on rank 0: parameter 'w' has no value; give one in its ParameterView or parameter_traits");
    for (const auto& [count, storage] : {std::pair{5u, ParameterStorage::borrowed}, std::pair{4u, ParameterStorage::in_buckets}})
        CHECK(says([&, count = count, storage = storage](ThreadBackend comm) {
                  std::vector<float> gradient(5);
                  std::vector<ParameterView> views = {{.name = "w", .value = {nullptr, count, DType::f32}, .gradient = buffer(gradient)}};
                  ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, views, Sgd{}, {.parameters = storage});
              }).find("'w' has no value") != std::string::npos);
}

namespace {

/// What `make(backend, parameters)` says where 'embedding' and 'head' have gradients of their own, and these values.
template <class Make>
std::string with_values(std::span<float> one, std::span<float> other, Make&& make, bool frozen = false) {
    return outcomes(1,
                    [&](ThreadBackend comm) {
                        std::vector<std::vector<float>> gradients = {std::vector<float>(one.size()), std::vector<float>(other.size())};
                        std::vector views = {parameter("embedding", one, gradients[0]), parameter("head", other, gradients[1])};
                        views[1].requires_grad = !frozen;
                        views[1].may_be_empty = true;
                        make(comm, views);
                    })[0]
        .text;
}

}  // namespace

TEST_CASE("tied weights that are registered twice, with gradients of their own, are refused: one update would be lost") {
    std::vector<float> memory(10);
    const std::span<float> all(memory);
    const std::string expected =
        "ShardedOptimizer on rank 0: the values of 'embedding' and 'head' share memory, and each would be updated without the other; register tied weights once, with `uses` of 2";
    const auto check = [&](auto&& make) {
        CHECK(with_values(all, all, make) == expected);
        CHECK(with_values(all, all.subspan(9), make) == expected);
        CHECK(with_values(all.subspan(5), all.first(6), make) == expected);
        CHECK(with_values(all.first(5), all.subspan(5), make) == "");
        CHECK(with_values(all, all.first(0), make) == "");
        CHECK(with_values(all, all, make, true) == "");
    };
    check([](auto comm, auto& views) { ShardedOptimizer<ThreadBackend, Sgd>(comm, views, Sgd{}); });
    check([](auto comm, auto& views) { ShardedOptimizer<ThreadBackend, Sgd, Zero2>(comm, views, Sgd{}); });
    check([](auto comm, auto& views) {
        ShardedOptimizer<ThreadBackend, Sgd>(comm, views, Sgd{}, {.parameters = ParameterStorage::in_buckets});
    });
    // Unfreezing one of them is the same mistake.
    CHECK(with_values(
              all, all,
              [](auto comm, auto& views) {
                  ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, views, Sgd{});
                  const std::size_t which[] = {1};
                  sharded.unfreeze(which);
              },
              true) == expected);
}

TEST_CASE("options without effect are refused") {
    run_threads(1, [](ThreadBackend comm) {
        auto model = initial_tensors({10, 20}, DType::f32);
        const ReducerOptions stored{.gradients = GradientStorage::in_buckets};
        CHECK(outcome_of([&] {
                  ShardedOptimizer<ThreadBackend, Sgd, Zero2>(comm, model, Sgd{}, {.reducer = stored});
              }).says("gradients of stage 2 are pooled; leave ReducerOptions::gradients out with Zero2"));
        CHECK(outcome_of([&] {
                  ShardedParameters<ThreadBackend, Sgd>(comm, model, Sgd{}, Units({0, 1}), {.reducer = stored});
              }).says("leave ReducerOptions::gradients out, and see shard_gradients"));
        const ReducerOptions often{.compare_weights_every = 10};
        const std::string not_compared = "weights that live with the library are compared once only";
        CHECK(outcome_of([&] {
                  ShardedParameters<ThreadBackend, Sgd>(comm, model, Sgd{}, Units({0, 1}), {.reducer = often});
              }).says(not_compared));
        CHECK(outcome_of([&] {
                  ShardedOptimizer<ThreadBackend, Sgd>(comm, model, Sgd{}, {.reducer = often, .parameters = ParameterStorage::in_buckets});
              }).says(not_compared));
    });
}
