// SPDX-License-Identifier: BSL-1.0
// A trainer writes weights, gradients or master weights between two calls. See random_writes_test.cpp for all combinations.
#include <doctest/doctest.h>

#include <concepts>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/sharding.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// Trains a model of these sizes with gradients of `gradient`, on every rank alike.
template <class Sharded>
void step_with(Sharded& sharded, const std::vector<std::size_t>& sizes, double gradient) {
    for (std::size_t i = sizes.size(); i-- > 0;) {
        const BufferView view = sharded.acquire_gradient(i);
        write(view, constant_bytes(view.dtype, sizes[i], gradient));
        sharded.mark_ready(i);
    }
    sharded.finish();
    sharded.step();
}

/// Writes weights before the first step, before a later one, and between `finish()` and `step()`. Returns which write was lost, or "".
template <class Stage>
std::string lost_weights(int ranks, Stage stage, const ShardingOptions& options, DType dtype, const std::vector<std::size_t>& sizes) {
    return findings(ranks, [&](ThreadBackend comm, Finding& finding) {
        auto model = initial_tensors(sizes, dtype);
        ShardedOptimizer sharded(comm, model, Sgd{.rate = 0.25f}, stage, options);
        const auto set = [&](double x) {
            const bool writes = options.parameters != ParameterStorage::shared || comm.rank() == 0;
            comm.barrier().wait();
            for (std::size_t i = 0; writes && i < sizes.size(); ++i) write(sharded.parameter_value(i), constant_bytes(dtype, sizes[i], x));
            comm.barrier().wait();
        };
        const auto check = [&](double x, const char* when) {
            for (std::size_t i = 0; i < sizes.size(); ++i)
                finding.check(holds(sharded.parameter_value(i), constant_bytes(dtype, sizes[i], x)), when);
        };
        set(5);
        step_with(sharded, sizes, 0);
        check(5, "before the first step");
        step_with(sharded, sizes, 0);
        check(5, "and then not written");
        set(3);
        step_with(sharded, sizes, 0);
        check(3, "between steps");
        for (std::size_t i = sizes.size(); i-- > 0;) {
            const BufferView view = sharded.acquire_gradient(i);
            write(view, constant_bytes(view.dtype, sizes[i], 0));
            sharded.mark_ready(i);
        }
        sharded.finish();
        set(2);
        sharded.step();
        check(2, "between finish() and step()");
        set(7);
        (void)sharded.rebuild_buckets();
        step_with(sharded, sizes, 0);
        check(7, "before buckets are planned anew");
        set(6);
        sharded.collect_state([&](std::size_t, std::size_t a, std::size_t, ConstBufferView piece) {
            finding.check(a != 0 || holds(piece, constant_bytes(piece.dtype, piece.count, 6)), "before the state is collected");
        });
        step_with(sharded, sizes, 1);
        check(5.75, "before a step");
    });
}

/// Marks all gradients, which are 1.
template <class Sharded>
void backward_of_ones(Sharded& sharded, const std::vector<std::size_t>& sizes) {
    for (std::size_t i = sizes.size(); i-- > 0;) {
        write(sharded.acquire_gradient(i), constant_bytes(DType::f32, sizes[i], 1));
        sharded.mark_ready(i);
    }
}

}  // namespace

TEST_CASE("weights that are written between two calls count, on every number of ranks, in every stage, layout and type") {
    for (const int ranks : rank_counts(1, 3))
        for (const DType dtype : {DType::f32, DType::bf16})
            for (const std::vector<std::size_t>& sizes : {std::vector<std::size_t>{40}, std::vector<std::size_t>{40, 7, 300}})
                for (const auto parameters : {ParameterStorage::borrowed, ParameterStorage::in_buckets, ParameterStorage::shared}) {
                    CAPTURE(ranks);
                    CAPTURE(name_of(dtype));
                    CAPTURE(sizes.size());
                    CAPTURE(static_cast<int>(parameters));
                    for (const ReducerOptions& options :
                         {ReducerOptions{}, ReducerOptions{.gradients = GradientStorage::in_buckets},
                          ReducerOptions{.accumulation = Accumulation::in_buckets}, ReducerOptions{.reduce_dtype = DType::bf16}}) {
                        CHECK(lost_weights(ranks, Zero1{}, {options, parameters}, dtype, sizes) == "");
                        CHECK(lost_weights(ranks, StepInside{}, {options, parameters}, dtype, sizes) == "");
                    }
                    CHECK(lost_weights(ranks, Zero2{}, {{}, parameters}, dtype, sizes) == "");
                }
}

TEST_CASE("gradients that are scaled by hand between finish() and step() are refused, whether a bucket holds one or two") {
    const auto check = [](int ranks, const std::vector<std::size_t>& sizes, auto stage, const ReducerOptions& options) {
        return findings(ranks, [&](ThreadBackend comm, Finding& finding) {
            auto model = initial_tensors(sizes, DType::f32);
            ShardedOptimizer sharded(comm, model, Sgd{}, stage, ShardingOptions{.reducer = options});
            const auto scale = [&] {
                for (std::size_t i = 0; i < sizes.size(); ++i)
                    for (float& g : sharded.acquire_gradient(i).template as<float>()) g *= 0.5f;
            };
            for (int s = 0; s < 3; ++s) {
                for (const bool looks_first : {true, false}) {
                    backward_of_ones(sharded, sizes);
                    sharded.finish();
                    if (looks_first) (void)sharded.gradient_norm();
                    scale();
                    const Bytes before = model[0].value;
                    for (int again = 0; again < 2; ++again) {
                        const Outcome refused = outcome_of([&] { sharded.step(); });
                        finding.check(refused.is(Errc::invalid_argument) && refused.says("the gradient of '") &&
                                          refused.says("was written or asked for after finish(); pass step() a factor"),
                                      refused.text);
                    }
                    finding.check(outcome_of([&] { (void)sharded.gradient_norm(); }).says("after finish()"), "a norm");
                    finding.check(outcome_of([&] { sharded.for_each_gradient([](const auto&) {}); }).error.has_value(),
                                  "for_each_gradient()");
                    finding.check(model[0].value == before, "the weights have changed");
                    comm.barrier().wait();
                    sharded.discard();
                }
                backward_of_ones(sharded, sizes);
                sharded.finish();
                sharded.step(0.5);
            }
        });
    };
    for (const int ranks : rank_counts(1, 3))
        for (const std::vector<std::size_t>& sizes : {std::vector<std::size_t>{40}, std::vector<std::size_t>{40, 7}}) {
            CAPTURE(ranks);
            CAPTURE(sizes.size());
            for (const ReducerOptions& options :
                 {ReducerOptions{}, ReducerOptions{.gradients = GradientStorage::in_buckets},
                  ReducerOptions{.accumulation = Accumulation::in_buckets}, ReducerOptions{.reduce_dtype = DType::bf16}}) {
                CHECK(check(ranks, sizes, Zero1{}, options) == "");
                CHECK(check(ranks, sizes, StepInside{}, options) == "");
            }
            CHECK(check(ranks, sizes, Zero2{}, {}) == "");
        }
}

TEST_CASE("one element of a gradient that is written after finish(): in the first step, and with check_writes in every step") {
    for (const bool checks : {false, true})
        CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
                  const std::vector<std::size_t> sizes = {40, 70};
                  auto model = initial_tensors(sizes, DType::f32);
                  ShardedOptimizer sharded(comm, model, Sgd{}, ShardingOptions{.reducer = {.check_writes = checks}});
                  for (int s = 0; s < 3; ++s) {
                      backward_of_ones(sharded, sizes);
                      sharded.finish();
                      sharded.acquire_gradient(1).as<float>()[3] = 2;
                      const Outcome refused = outcome_of([&] { sharded.step(); });
                      finding.check(refused.says("the gradient of 'p1' was written or asked for after finish()") == (s == 0 || checks),
                                    refused.text);
                      comm.barrier().wait();
                      if (s == 0 || checks) sharded.acquire_gradient(1).as<float>()[3] = 1;
                      if (s == 0 || checks) sharded.discard();
                      if (s != 0) continue;
                      backward_of_ones(sharded, sizes);
                      sharded.finish();
                      sharded.step();
                  }
              }) == "");
}

TEST_CASE("weights that were written where they live with the library, and differ between ranks, are found in the first finish()") {
    const auto check = [](auto stage) {
        const auto seen = outcomes(2, [&](ThreadBackend comm) {
            const std::vector<std::size_t> sizes = {30, 40};
            auto model = initial_tensors(sizes, DType::f32);
            ShardedOptimizer sharded(comm, model, Sgd{}, stage, ShardingOptions{.parameters = ParameterStorage::in_buckets});
            write(sharded.parameter_value(1), constant_bytes(DType::f32, 40, comm.rank()));
            step_with(sharded, sizes, 1);
        });
        for (const Outcome& outcome : seen) CHECK(outcome.says("the weights of 'p1' differ"));
    };
    check(Zero1{});
    check(Zero2{});
    check(StepInside{});
}

namespace {

/// Writes master weights, and forgets to publish them, or does so where an optimizer that stands outside does.
template <class Make>
std::string unpublished(int ranks, DType dtype, Make&& make) {
    return findings(ranks, [&](ThreadBackend comm, Finding& finding) {
        const std::vector<std::size_t> sizes = {40, 7};
        auto model = initial_tensors(sizes, dtype);
        auto sharded = make(comm, model);
        const auto set = [&](double x) {
            sharded->for_each_shard([&](std::size_t, std::size_t a, std::size_t, BufferView view) {
                if (a == 0) write(view, constant_bytes(DType::f32, view.count, x));
            });
        };
        const auto check = [&](double x) {
            const std::vector<Bytes> all = weights(*sharded);
            for (std::size_t i = 0; i < sizes.size(); ++i) finding.check(all[i] == constant_bytes(dtype, sizes[i], x), "other weights");
        };
        for (int s = 0; s < 2; ++s) {
            set(5 + s);
            const Outcome refused = outcome_of([&] { sharded->mark_ready(1); });
            finding.check(refused.is(Errc::invalid_argument) && refused.says("call publish() on all ranks"), refused.text);
            sharded->publish();
            check(5 + s);
            step_with(*sharded, sizes, 0);
            check(5 + s);
        }
        for (std::size_t i = sizes.size(); i-- > 0;) {
            const BufferView view = sharded->acquire_gradient(i);
            write(view, constant_bytes(view.dtype, sizes[i], 0));
            sharded->mark_ready(i);
        }
        sharded->finish();
        set(4);
        sharded->step();
        check(4);
        step_with(*sharded, sizes, 0);
    });
}

}  // namespace

TEST_CASE("master weights that were written, and not published, are refused by the next backward") {
    for (const int ranks : rank_counts(1, 3))
        for (const DType dtype : {DType::f32, DType::bf16}) {
            CAPTURE(ranks);
            CAPTURE(name_of(dtype));
            CHECK(unpublished(ranks, dtype, [](ThreadBackend comm, auto& model) {
                      return std::make_unique<ShardedOptimizer<ThreadBackend, Sgd>>(comm, model, Sgd{});
                  }) == "");
            CHECK(unpublished(ranks, dtype, [](ThreadBackend comm, auto& model) {
                      return std::make_unique<ShardedOptimizer<ThreadBackend, Sgd, Zero2>>(comm, model, Sgd{});
                  }) == "");
            CHECK(unpublished(ranks, dtype, [](ThreadBackend comm, auto& model) {
                      return std::make_unique<ShardedParameters<ThreadBackend, Sgd>>(comm, model, Sgd{}, Units({0, 1}));
                  }) == "");
        }
}

// Gathered weights are copies: they cannot be written.
static_assert(std::same_as<decltype(std::declval<const ShardedParameters<ThreadBackend, Sgd>&>().parameter_value(0)), ConstBufferView>);
