// SPDX-License-Identifier: BSL-1.0
// ctest: LIBRARIES gradsync_fake_nccl gradsync_fake_passes
// Sharded training in device memory, over the fakes of support/fake: which stream its communicators follow, and what optimizers get.
#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/cuda/optimizers.hpp>
#include <gradsync/shard/hybrid.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "support/device_training.hpp"
#include "support/fake/fake.hpp"
#include "support/rank_threads.hpp"

using namespace gradsync;

namespace {

using StagedThreads = StagingBackend<ThreadBackend>;

template <class F>
void on_nccl_ranks(int size, F&& f) {
    gradsync_test::run_rank_threads(
        size, [](auto& rendezvous) { return NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60)}); }, f);
}

template <class B>
std::vector<ParameterView> views_of(std::vector<gradsync_test::Numbers<B>>& weights) {
    std::vector<ParameterView> views;
    for (auto& w : weights) {
        views.push_back({.name = "p" + std::to_string(views.size()), .value = w.view(), .gradient = w.view()});
        views.back().gradient.data = nullptr;
    }
    return views;
}

/// Weights of 1, after two steps that halve them on a stream that is set after construction, and is late.
template <class B>
std::vector<float> halved_twice_on_another_stream(B comm, cudaStream_t stream) {
    std::vector<gradsync_test::Numbers<B>> weights;
    for (int i = 0; i < 3; ++i) weights.emplace_back(1000, 1.0f);
    ShardedParameters sharded(comm, views_of(weights), cuda::Sgd({.learning_rate = 0.5, .momentum = 0}), Units({0, 1, 2}));
    sharded.broadcast_parameters();
    comm.set_stream(stream);
    for (int step = 0; step < 2; ++step) {
        gradsync_fake::enqueue(stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
        for (std::size_t u = 3; u-- > 0;) {
            const auto use = sharded.gather(u);
            detail::passes_of(comm).copy(sharded.parameter_value(u), sharded.acquire_gradient(u));
            sharded.mark_ready(u);
        }
        sharded.finish();
        sharded.step();
    }
    std::vector<float> all;
    for (std::size_t u = 0; u < 3; ++u) {
        const auto use = sharded.gather(u);
        const std::vector<float> values = gradsync_test::read(comm, sharded.parameter_value(u));
        all.insert(all.end(), values.begin(), values.end());
    }
    return all;
}

}  // namespace

TEST_CASE("streams of sharding: gathers follow a stream that is set after construction") {
    const std::vector<float> expected(3000, 0.25f);
    gradsync_test::Findings findings;
    on_nccl_ranks(2, [&](NcclBackend comm) {
        const cuda::Stream stream = cuda::make_stream();
        findings.check(halved_twice_on_another_stream(comm, stream.get()) == expected, "over NCCL");
        comm.set_stream(nullptr);
    });
    run_threads(2, [&](ThreadBackend host) {
        const cuda::Stream stream = cuda::make_stream();
        findings.check(halved_twice_on_another_stream(StagedThreads(host), stream.get()) == expected, "staged");
    });
}

TEST_CASE("streams of sharding: gradients are seen with their scale") {
    on_nccl_ranks(1, [&](NcclBackend comm) {
        std::vector<gradsync_test::Numbers<NcclBackend>> weights;
        weights.emplace_back(100, 3.0f);
        ShardedOptimizer sharded(comm, views_of(weights), cuda::Sgd(), Zero2{});
        for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
            detail::passes_of(comm).copy(sharded.parameter_value(0), sharded.acquire_gradient(0));
            sharded.mark_ready(0);
            sharded.finish();
        }
        float gradient = 0;
        sharded.for_each_gradient([&](const DeviceSlice& slice, double scale) {
            gradient = gradsync_test::read(comm, BufferView{const_cast<void*>(slice.gradient.data), slice.gradient.count,
                                                            slice.gradient.dtype, MemorySpace::device})[99] *
                       static_cast<float>(scale);
        });
        CHECK(gradient == 3.0f);  // the mean of two
        sharded.discard();
    });
}

TEST_CASE("streams of sharding: what the library's optimizers do not take is refused at construction") {
    on_nccl_ranks(1, [&](NcclBackend comm) {
        std::vector<gradsync_test::Numbers<NcclBackend>> weights;
        weights.emplace_back(10, 1.0f, DType::f64);
        CHECK_THROWS_WITH_AS(ShardedOptimizer(comm, views_of(weights), cuda::AdamW()),
                             doctest::Contains("parameter 'p0' has weights or gradients in f64, which the optimizer does not take"), Error);
    });
}

TEST_CASE("streams of sharding: a communicator made from one with a stream of its own follows the trainer's") {
    on_nccl_ranks(1, [&](NcclBackend comm) {
        const cuda::Stream stream = cuda::make_stream();
        comm.set_stream(stream.get());
        NcclBackend replicas = comm.duplicate();
        replicas.use_own_stream();
        CHECK(replicas.stream() != stream.get());
        CHECK(replicas.duplicate().stream() == stream.get());
        comm.set_stream(nullptr);
    });
}

TEST_CASE("streams of sharding: the replicas of staged groups follow the group") {
    gradsync_test::Findings findings;
    run_threads(2, [&](ThreadBackend host) {
        const cuda::Stream stream = cuda::make_stream();
        auto [group, replicas] = hybrid_groups(StagedThreads(host), 1);
        group.set_stream(stream.get());
        std::vector<gradsync_test::Numbers<StagedThreads>> weights;
        weights.emplace_back(100, 1.0f);
        ShardedOptimizer sharded(group, views_of(weights), cuda::Sgd(), Zero2{}, HybridReduceScatter<StagedThreads>(replicas));
        detail::passes_of(group).copy(sharded.parameter_value(0), sharded.acquire_gradient(0));
        sharded.mark_ready(0);
        sharded.finish();
        sharded.step();
        findings.check(replicas.stream() == stream.get(), "the replicas kept their stream");
    });
}
