// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: pass one stage: Zero1, Zero2 or StepInside
// expect 2: gradsync: this argument is not of the type that the template arguments name
// expect 3: gradsync: this constructor takes its options and policies in any order, and one of these arguments is neither: its type is the T in
// expect 3: is_option_or_policy<.*ReducerOptions>
// expect 4: gradsync: this constructor takes its options and policies in any order, and one of these arguments is neither: its type is the T in
// expect 4: is_option_or_policy<.*Flat>
// expect 5: gradsync: sharded training needs an exchange that scatters \(ReduceScatter, HybridReduceScatter, ...\)
// expect 6: gradsync: with StepInside buckets leave in step\(\): leave the overlap policy out
// errors: 2
#include <type_traits>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

using namespace gradsync;

struct Sgd {
    std::size_t state_count() const { return 0; }
    void begin_step() {}
    void step(const OptimizerSlice<float>&) {}
};

void f(ThreadBackend comm, std::vector<std::vector<float>>& model) {
#if GRADSYNC_EXPECT_FAILURE == 1
    ShardedOptimizer sync(comm, model, Sgd{}, Zero1{}, Zero2{});
#elif GRADSYNC_EXPECT_FAILURE == 2
    ShardedOptimizer<ThreadBackend, Sgd, Zero1> sync(comm, model, Sgd{}, Zero2{});
#elif GRADSYNC_EXPECT_FAILURE == 3
    ShardedOptimizer sync(comm, model, Sgd{}, Zero2{}, ReducerOptions{});  // they belong into ShardingOptions
#elif GRADSYNC_EXPECT_FAILURE == 4
    ShardedParameters sync(comm, model, Sgd{}, Units({0, 1}), Flat{});
#elif GRADSYNC_EXPECT_FAILURE == 5
    ShardedOptimizer sync(comm, model, Sgd{}, AllReduce{});
#elif GRADSYNC_EXPECT_FAILURE == 6
    ShardedOptimizer sync(comm, model, Sgd{}, StepInside{}, NoOverlap{});
#else
    ShardedOptimizer inside(comm, model, Sgd{}, StepInside{});
    ShardedOptimizer stage_two(comm, model, Sgd{}, OverlapForward{}, Zero2{}, ShardingOptions{}, Flat{});
    static_assert(std::is_same_v<decltype(stage_two), ShardedOptimizer<ThreadBackend, Sgd, Zero2, Flat, OverlapForward>>);
    ShardedOptimizer defaults(comm, model, Sgd{}, {.parameters = ParameterStorage::in_buckets});
    static_assert(std::is_same_v<decltype(defaults), ShardedOptimizer<ThreadBackend, Sgd>>);
    ShardedParameters stage_three(comm, model, Sgd{}, Units({0, 1}), ReduceScatter{}, ShardedParametersOptions{.prefetch = 2}, NoOverlap{});
    static_assert(std::is_same_v<decltype(stage_three), ShardedParameters<ThreadBackend, Sgd, NoOverlap>>);
#endif
}
