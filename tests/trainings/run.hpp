// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/hybrid.hpp>

#include "support/temporary_directory.hpp"
#include "trainer.hpp"

namespace gradsync_test {

/// Kernels that compute in host memory, at once.
template <class B>
class HostKernels final : public Kernels {
public:
    using Optimizer = AdamW;

    HostKernels(B&, const DrawnTraining&) {}
    void use(const gradsync::BufferView&) override {}
    void run(std::function<void()> kernel) override { kernel(); }
    void finish() override {}
    void disturb(int, int, bool) override {}
};

/// Runs this rank of the training, or of a leg of it.
template <template <class> class KernelsOf = HostKernels, class B>
Trained run_rank(B world, const DrawnTraining& t, const Leg& leg) {
    using namespace gradsync;
    using O = typename KernelsOf<B>::Optimizer;
    constexpr MemorySpace space = B::memory_space;
    const int rank = world.rank();
    std::vector<Tensor> model = initial_model(t);
    std::vector<ParameterView> views;
    std::size_t end = 0, arena_bytes = 0;  // the latter are the same on all ranks
    std::vector<std::size_t> offsets(model.size());
    const auto seed = static_cast<std::uint32_t>(t.layout == 2 ? rank : 1000);
    for (const std::size_t i : shuffled(model.size(), seed)) {
        const std::size_t size = size_of(t.parameters[i].gradient);
        offsets[i] = (end + size - 1) / size * size;
        end = offsets[i] + model[i].count() * size;
        arena_bytes += model[i].count() * size + sizeof(double);
    }
    const auto arena = world.allocate(arena_bytes);
    for (std::size_t i = 0; i < model.size(); ++i) {
        Tensor& p = model[i];
        const int thaws = t.parameters[i].thaws;
        const bool is_trained = thaws == 0 || thaws < leg.first;
        if (rank != t.root || (is_trained && !leg.from.empty())) p.value = random_gradient(p, rank, 78, i);
        p.gradient.resize((1 + p.count()) * size_of(t.parameters[i].gradient));  // none without an address, which would mean no gradient
        views.push_back({.name = p.name,
                         .value = {p.value.data(), p.count(), p.dtype, space},
                         .gradient = {t.layout == 0 ? p.gradient.data() : static_cast<std::byte*>(arena.data()) + offsets[i], p.count(),
                                      t.parameters[i].gradient, space},
                         .requires_grad = is_trained,
                         .uses = t.parameters[i].uses,
                         .may_be_empty = true});
    }
    const AnyBuckets buckets = t.bucket_policy();
    const AnyOverlap overlap = t.overlap_policy();
    using Hybrid = HybridReduceScatter<B>;
    std::optional<HybridGroups<B>> groups;
    if (t.per_group != 0) groups.emplace(hybrid_groups(world, t.per_group));
    KernelsOf<B> kernels(groups ? groups->group : world, t);
    for (const ParameterView& p : views) {
        kernels.use(p.value);
        if (t.layout == 0) kernels.use(p.gradient);
    }
    const auto run = [&](Face&& sync) { return train(sync, t, leg, model, rank, kernels, make_whole_optimizer<O>); };
    const ShardingOptions sharding{.reducer = t.options, .parameters = t.storage};

    if (t.kind == Kind::reducer && t.forward)
        return run(FaceOf<Reducer<B, AnyBuckets, OverlapForward>>(world, views, t.options, buckets, OverlapForward()));
    if (t.kind == Kind::reducer) return run(FaceOf<Reducer<B, AnyBuckets, AnyOverlap>>(world, views, t.options, buckets, overlap));
    if (t.kind == Kind::zero1 && groups)
        return run(FaceOf<ShardedOptimizer<B, O, Zero1, AnyBuckets, AnyOverlap, Hybrid>>(groups->group, views, O{}, sharding, buckets,
                                                                                         overlap, Hybrid(groups->replicas)));
    if (t.kind == Kind::zero1)
        return run(FaceOf<ShardedOptimizer<B, O, Zero1, AnyBuckets, AnyOverlap>>(world, views, O{}, sharding, buckets, overlap));
    if (t.kind == Kind::zero2 && groups)
        return run(FaceOf<ShardedOptimizer<B, O, Zero2, AnyBuckets, AnyOverlap, Hybrid>>(groups->group, views, O{}, sharding, buckets,
                                                                                         overlap, Hybrid(groups->replicas)));
    if (t.kind == Kind::zero2 && t.forward)
        return run(
            FaceOf<ShardedOptimizer<B, O, Zero2, AnyBuckets, OverlapForward>>(world, views, O{}, sharding, buckets, OverlapForward()));
    if (t.kind == Kind::zero2)
        return run(FaceOf<ShardedOptimizer<B, O, Zero2, AnyBuckets, AnyOverlap>>(world, views, O{}, sharding, buckets, overlap));
    if constexpr (space == MemorySpace::host) {
        if (t.kind == Kind::step_inside)
            return run(FaceOf<ShardedOptimizer<B, O, StepInside, AnyBuckets>>(world, views, O{}, sharding, buckets));
    }

    std::vector<std::size_t> unit_of;
    for (std::size_t i = 0; i < model.size(); ++i) unit_of.push_back(t.unit_of(i));
    const Units units(unit_of);
    if (groups)
        return run(FaceOf<ShardedParameters<B, O, AnyOverlap, Hybrid>>(groups->group, views, O{}, units, t.stage3, overlap,
                                                                       Hybrid(groups->replicas)));
    return run(FaceOf<ShardedParameters<B, O, AnyOverlap>>(world, views, O{}, units, t.stage3, overlap));
}

/// Runs the training, in two jobs if it is saved, and describes its first fault; returns "" if there is none. `run(t, leg)` returns the
/// results of all ranks.
template <class O = AdamW, class Run>
std::string run_legs(const DrawnTraining& t, Run&& run) {
    if (t.saved_after == 0) return difference<O>(t, run(t, Leg{0, t.steps}));
    const TemporaryDirectory saved, moved;
    const std::vector<Trained> before = run(t, Leg{0, t.saved_after, {}, saved.path()});
    (void)run(t.between(), Leg{t.saved_after, t.saved_after, saved.path(), moved.path()});
    std::vector<Trained> after = run(t.resumed(), Leg{t.saved_after, t.steps, moved.path(), {}});
    for (std::size_t r = 0; r < after.size(); ++r)
        after[r].norms.insert(after[r].norms.begin(), before[r].norms.begin(), before[r].norms.end());
    return difference<O>(t, after);
}

}  // namespace gradsync_test
