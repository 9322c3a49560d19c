// SPDX-License-Identifier: BSL-1.0
// What a trainer writes between two calls: weights.
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

/// Writes weights before the first step, before a later one, and between `finish()` and `step()`. What is not kept, or "".
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
        if (!std::same_as<Stage, StepInBackward>) set(2);
        sharded.step();
        check(std::same_as<Stage, StepInBackward> ? 3 : 2, "between finish() and step()");
        set(7);
        (void)sharded.rebuild_buckets();
        step_with(sharded, sizes, 0);
        check(7, "before buckets are planned anew");
        set(6);
        sharded.collect_everywhere([&](std::size_t, std::size_t a, std::size_t, ConstBufferView piece) {
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
                    if (parameters != ParameterStorage::shared)
                        CHECK(lost_weights(ranks, StepInBackward{}, {{}, parameters}, dtype, sizes) == "");
                }
}

TEST_CASE("steps in the backward: a broadcast that was forgotten is found in the first finish(), wherever weights live") {
    for (const int ranks : rank_counts(2, 3))
        for (const bool arena : {false, true})
            for (const bool forgets : {true, false})
                for (const auto parameters : {ParameterStorage::borrowed, ParameterStorage::in_buckets}) {
                    CAPTURE(ranks);
                    CAPTURE(arena);
                    CAPTURE(forgets);
                    CAPTURE(static_cast<int>(parameters));
                    const auto seen = outcomes(ranks, [&](ThreadBackend comm) {
                        std::vector<float> all(48), w0(32), w1(16);
                        const std::vector<std::size_t> sizes = {32, 16};
                        std::vector<ParameterView> views = {{.name = "w0", .value = {arena ? all.data() : w0.data(), 32}},
                                                            {.name = "w1", .value = {arena ? all.data() + 32 : w1.data(), 16}}};
                        ShardedOptimizer sharded(comm, views, Sgd{}, StepInBackward{}, ShardingOptions{.parameters = parameters});
                        // As a trainer does that loads or draws its weights when it has all objects.
                        for (float& x : sharded.parameter_value(1).as<float>()) x = static_cast<float>(comm.rank());
                        if (!forgets) sharded.broadcast_parameters();
                        backward_of_ones(sharded, sizes);
                        sharded.finish();
                        sharded.step();
                        backward_of_ones(sharded, sizes);
                        sharded.finish();
                        sharded.step();
                    });
                    for (const Outcome& outcome : seen) {
                        CHECK(outcome.is(Errc::parameter_mismatch) == forgets);
                        CHECK(outcome.says("the weights of 'w1' differ") == forgets);
                        CHECK(outcome.says("call broadcast_parameters() before the first step") == forgets);
                    }
                }
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
