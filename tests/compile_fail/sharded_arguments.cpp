// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: pass one stage: Zero1, Zero2 or StepInside
// expect 2: gradsync: this argument is not of the type that the template arguments name
// expect 3: gradsync: this constructor takes its options and policies last, in any order, and one of these arguments is neither: its type is the T in
// expect 3: is_option_or_policy<.*ReducerOptions>
// expect 4: gradsync: this constructor takes its options and policies last, in any order, and one of these arguments is neither: its type is the T in
// expect 4: is_option_or_policy<.*Flat>
// expect 5: gradsync: sharded training needs an exchange that scatters \(ReduceScatter, HybridReduceScatter, ...\)
// expect 6: gradsync: with StepInside buckets leave in step\(\): leave the overlap policy out
// expect 7: gradsync: StepInside steps a parameter in parts, as they are reduced: use Zero1 or Zero2
// expect 8: gradsync: StepInside steps a parameter in parts, as they are reduced: use Zero1 or Zero2
// expect 9: gradsync: pass WholeParameters once
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

struct Muon : Sgd {
    using Sgd::step;
    std::size_t scratch_count(std::span<const std::size_t>) const { return 0; }
    void step(const OptimizerMatrix<float>&) {}
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
#elif GRADSYNC_EXPECT_FAILURE == 7
    ShardedOptimizer sync(comm, model, Muon{}, StepInside{});
#elif GRADSYNC_EXPECT_FAILURE == 8
    ShardedOptimizer sync(comm, model, Sgd{}, WholeParameters{}, StepInside{});
#elif GRADSYNC_EXPECT_FAILURE == 9
    ShardedOptimizer sync(comm, model, Sgd{}, WholeParameters{}, WholeParameters{});
#else
    ShardedOptimizer whole(comm, model, Muon{}, Zero2{}, WholeParameters{});
    static_assert(std::is_same_v<decltype(whole), ShardedOptimizer<ThreadBackend, Muon, Zero2>>);
    ShardedParameters whole_units(comm, model, Muon{}, Units({0, 1}), WholeParameters{}, NoOverlap{});
    static_assert(std::is_same_v<decltype(whole_units), ShardedParameters<ThreadBackend, Muon, NoOverlap>>);
    ShardedOptimizer inside(comm, model, Sgd{}, StepInside{});
    ShardedOptimizer stage_two(comm, model, Sgd{}, OverlapForward{}, Zero2{}, ShardingOptions{}, Flat{});
    static_assert(std::is_same_v<decltype(stage_two), ShardedOptimizer<ThreadBackend, Sgd, Zero2, Flat, OverlapForward>>);
    ShardedOptimizer defaults(comm, model, Sgd{}, {.parameters = ParameterStorage::in_buckets});
    static_assert(std::is_same_v<decltype(defaults), ShardedOptimizer<ThreadBackend, Sgd>>);
    ShardedParameters stage_three(comm, model, Sgd{}, Units({0, 1}), ReduceScatter{}, ShardedParametersOptions{.prefetch = 2}, NoOverlap{});
    static_assert(std::is_same_v<decltype(stage_three), ShardedParameters<ThreadBackend, Sgd, NoOverlap>>);
#endif
}
