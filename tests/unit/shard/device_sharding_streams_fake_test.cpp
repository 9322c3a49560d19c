// SPDX-License-Identifier: BSL-1.0
// ctest: SANITIZED LIBRARIES gradsync_device_support gradsync_fake_nccl gradsync_fake_passes
// Sharded training in device memory, over the fakes of support/fake, on streams that change or end.
#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/cuda/optimizers.hpp>
#include <gradsync/shard/hybrid.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "device_sharding_fakes.hpp"
#include "support/device_training.hpp"
#include "support/fake/fake.hpp"
#include "support/rank_threads.hpp"

using namespace gradsync;
using gradsync_test::on_nccl_ranks;
using gradsync_test::StagedThreads;
using gradsync_test::views_of;

namespace {

/// A step of stage 3 with one parameter a unit.
template <class B, class Sharded>
void step_with_weights_as_gradients(B& comm, Sharded& sharded, std::size_t units) {
    for (std::size_t u = units; u-- > 0;) {
        const auto use = sharded.gather(u);
        detail::passes_of(comm).copy(sharded.parameter_value(u), sharded.acquire_gradient(u));
        sharded.mark_ready(u);
    }
    sharded.finish();
    sharded.step();
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
        step_with_weights_as_gradients(comm, sharded, 3);
    }
    std::vector<float> all;
    for (std::size_t u = 0; u < 3; ++u) {
        const auto use = sharded.gather(u);
        const std::vector<float> values = gradsync_test::read(comm, sharded.parameter_value(u));
        all.insert(all.end(), values.begin(), values.end());
    }
    return all;
}

/// A step, and an end: the stream of the step is gone by then, and a gather of the step is in flight.
template <class B>
void end_after_a_stream(B comm) {
    std::vector<gradsync_test::Numbers<B>> weights;
    for (int i = 0; i < 2; ++i) weights.emplace_back(1000, 1.0f);
    const cuda::Stream last = cuda::make_stream();
    {
        cuda::Stream first = cuda::make_stream();
        comm.set_stream(first.get());
        ShardedParameters sharded(comm, views_of(weights), cuda::Sgd(), Units({0, 1}));
        sharded.broadcast_parameters();
        step_with_weights_as_gradients(comm, sharded, 2);
        cuda::order(first.get(), last.get(), cuda::make_event());
        comm.set_stream(last.get());
        first = {};
    }
    comm.set_stream(nullptr);
}

}  // namespace

TEST_CASE("sharding on devices: gathers follow a stream that is set after construction") {
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

TEST_CASE("sharding on devices: nothing goes to a stream that is gone after another one was set") {
    for (const NcclMemory memory : {NcclMemory::plain, NcclMemory::registered})
        gradsync_test::run_rank_threads(
            2, [&](auto& rendezvous) { return NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60), .memory = memory}); },
            [](NcclBackend comm) { end_after_a_stream(comm); });
    run_threads(2, [](ThreadBackend host) { end_after_a_stream(StagedThreads(host)); });
}

TEST_CASE("sharding on devices: a communicator made from one with a stream of its own follows the trainer's") {
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

TEST_CASE("sharding on devices: the replicas of staged groups follow the group") {
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

TEST_CASE("sharding on devices: the replicas of staged groups follow the group to a stream that is set before finish()") {
    gradsync_test::Findings findings;
    gradsync_fake::upload_slowly(std::chrono::milliseconds(20));
    run_threads(4, [&](ThreadBackend host) {
        const cuda::Stream first = cuda::make_stream(), second = cuda::make_stream();
        auto [group, replicas] = hybrid_groups(StagedThreads(host), 2);
        group.set_stream(first.get());
        std::vector<gradsync_test::Numbers<StagedThreads>> weights;
        weights.emplace_back(100, 8.0f);
        gradsync_test::Numbers<StagedThreads> gradient(100, static_cast<float>(host.rank()));
        ShardedOptimizer sharded(group, views_of(weights), cuda::Sgd({.learning_rate = 1, .momentum = 0}), Zero2{},
                                 HybridReduceScatter<StagedThreads>(replicas));
        detail::passes_of(group).copy(gradient.view(), sharded.acquire_gradient(0));
        sharded.mark_ready(0);
        cuda::order(first.get(), second.get(), cuda::make_event());
        group.set_stream(second.get());
        sharded.finish();
        sharded.step();
        findings.check(gradsync_test::read(group, weights[0].view()) == std::vector<float>(100, 6.5f), "not the mean of all ranks");
    });
    gradsync_fake::upload_slowly(std::chrono::milliseconds(0));
}

TEST_CASE("sharding on devices: replicas get the weights of the first group, whatever their stream") {
    gradsync_test::Findings findings;
    gradsync_fake::upload_slowly(std::chrono::milliseconds(20));
    run_threads(4, [&](ThreadBackend host) {
        const cuda::Stream stream = cuda::make_stream();
        auto [group, replicas] = hybrid_groups(StagedThreads(host), 2);
        group.set_stream(stream.get());
        std::vector<gradsync_test::Numbers<StagedThreads>> weights;
        weights.emplace_back(100, host.rank() == 0 ? 8.0f : 9.0f);
        ShardedOptimizer sharded(group, views_of(weights), cuda::Sgd(), Zero2{}, HybridReduceScatter<StagedThreads>(replicas));
        sharded.broadcast_parameters();
        findings.check(gradsync_test::read(group, weights[0].view()) == std::vector<float>(100, 8.0f), "not rank 0's weights");
    });
    gradsync_fake::upload_slowly(std::chrono::milliseconds(0));
}
