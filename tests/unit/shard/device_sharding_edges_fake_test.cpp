// SPDX-License-Identifier: BSL-1.0
// ctest: SANITIZED LIBRARIES gradsync_device_support gradsync_fake_nccl gradsync_fake_passes COST 11
// Sharded training in device memory, over the fakes of support/fake: sizes at the edge, ranks that throw, what is refused.
#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/cuda/optimizers.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "device_sharding_fakes.hpp"
#include "support/device_training.hpp"
#include "support/fake/fake.hpp"
#include "support/rank_threads.hpp"
#include "support/slow_build.hpp"

using namespace gradsync;
using gradsync_test::on_nccl_ranks;
using gradsync_test::StagedThreads;
using gradsync_test::views_of;

namespace {

/// Weights of 1, after three steps with themselves as gradients.
template <class B>
std::vector<float> shrunk(B comm, const std::vector<std::size_t>& sizes, int stage) {
    std::vector<gradsync_test::Numbers<B>> weights;
    for (const std::size_t n : sizes) weights.emplace_back(n, 1.0f);
    const cuda::Sgd sgd({.learning_rate = 0.25, .momentum = 0.5});
    std::vector<float> all;
    const auto train = [&](auto& sharded, auto&& use) {
        sharded.broadcast_parameters();
        for (int step = 0; step < 3; ++step) {
            for (std::size_t i = sizes.size(); i-- > 0;) {
                [[maybe_unused]] const auto in_use = use(i);
                detail::passes_of(comm).copy(sharded.parameter_value(i), sharded.acquire_gradient(i));
                sharded.mark_ready(i);
            }
            sharded.finish();
            all.push_back(static_cast<float>(sharded.gradient_norm()));
            sharded.step();
        }
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            [[maybe_unused]] const auto in_use = use(i);
            const std::vector<float> values = gradsync_test::read(comm, sharded.parameter_value(i));
            all.insert(all.end(), values.begin(), values.end());
        }
        sharded.collect_state([&](std::size_t, std::size_t, std::size_t, ConstBufferView piece) {
            const auto* const floats = static_cast<const float*>(piece.data);
            all.insert(all.end(), floats, floats + piece.count);
        });
    };
    if (stage == 3) {
        std::vector<std::size_t> unit_of;
        for (std::size_t i = 0; i < sizes.size(); ++i) unit_of.push_back(i);
        ShardedParameters sharded(comm, views_of(weights), sgd, Units(unit_of));
        train(sharded, [&](std::size_t i) { return sharded.gather(i); });
    } else if (stage == 2) {
        ShardedOptimizer sharded(comm, views_of(weights), sgd, ShardingOptions{}, Zero2{});
        train(sharded, [](std::size_t) { return 0; });
    } else {
        ShardedOptimizer sharded(comm, views_of(weights), sgd, ShardingOptions{.reducer = {.gradients = GradientStorage::in_buckets}});
        train(sharded, [](std::size_t) { return 0; });
    }
    return all;
}

/// The same by a loop.
std::vector<float> shrunk(const std::vector<std::size_t>& sizes) {
    std::size_t count = 0;
    for (const std::size_t n : sizes) count += n;
    float weight = 1, momentum = 0;
    std::vector<float> all;
    for (int step = 0; step < 3; ++step) {
        all.push_back(std::sqrt(static_cast<float>(count)) * weight);
        momentum = 0.5f * momentum + weight;
        weight -= 0.25f * momentum;
    }
    all.resize(3 + 2 * count, weight);  // and masters
    all.resize(3 + 3 * count, momentum);
    std::sort(all.begin() + 3, all.end());
    return all;
}

}  // namespace

TEST_CASE("sharding on devices works with fewer elements than ranks, and empty parameters") {
    for (const std::vector<std::size_t>& sizes : {std::vector<std::size_t>{0}, {1}, {0, 1, 0}, {2, 0, 1, 3, 17}})
        for (int stage = 1; stage <= 3; ++stage)
            for (const int size : gradsync_test::rank_counts()) {
                CAPTURE(sizes.size());
                CAPTURE(stage);
                CAPTURE(size);
                const std::vector<float> expected = shrunk(sizes);
                gradsync_test::Findings findings;
                const auto check = [&](const char* how, std::vector<float> result) {
                    std::sort(result.begin() + 3, result.end());  // pieces come in the order of the buckets
                    findings.check(result.size() == expected.size() && gradsync_test::distance(result, expected) < 1e-6f, how);
                };
                on_nccl_ranks(size, [&](NcclBackend comm) { check("over NCCL", shrunk(comm, sizes, stage)); });
                run_threads(size, [&](ThreadBackend host) { check("staged", shrunk(StagedThreads(host), sizes, stage)); });
            }
}

TEST_CASE("sharding on devices: a rank that throws in the middle of a step keeps nobody waiting, though its device waits") {
    std::string told;  // to rank 1
    const auto train = [&](NcclBackend comm) {
        std::vector<gradsync_test::Numbers<NcclBackend>> weights;
        for (int i = 0; i < 2; ++i) weights.emplace_back(10, 1.0f);
        ShardedParameters sharded(comm, views_of(weights), cuda::Sgd(), Units({0, 1}),
                                  ShardedParametersOptions{.reducer = {.unused = UnusedParameters::find_unused}});
        const auto use = sharded.gather(1);
        comm.host().barrier().wait();  // so that rank 1 is told at its next call, not in gather()
        if (comm.rank() == 1) {
            try {
                comm.host().barrier().wait();
            } catch (const Error& error) {
                told = error.what();
            }
            return;
        }
        detail::passes_of(comm).copy(sharded.parameter_value(1), sharded.acquire_gradient(1));
        sharded.mark_ready(1);  // rank 1 does not use it, and would join its bucket in finish()
        throw std::runtime_error("rank 0 gives up");
    };
    CHECK_THROWS_WITH_AS(on_nccl_ranks(2, train), "rank 0 gives up", std::runtime_error);
    CHECK_MESSAGE(told.find("an exception ended its step") != std::string::npos, told);  // and not that it waited for the time limit
}

TEST_CASE("sharding on devices: small parameters that fill a bucket all the time leave the large slot to the large unit") {
    gradsync_test::Findings findings;
    const auto train = [&]<class B>(B comm, auto&& make_busy) {
        std::vector<gradsync_test::Numbers<B>> weights;
        for (const std::size_t n : {4u, 1500u, 7u, 1200u, 900u}) weights.emplace_back(n, 1.0f);
        const cuda::Stream stream = cuda::make_stream();
        comm.set_stream(stream.get());
        {
            ShardedParameters sharded(comm, views_of(weights), cuda::Sgd({.learning_rate = 0.5, .momentum = 0}), Units({0, 0, 0, 1, 2}),
                                      ShardedParametersOptions{.replicate_below = 10});
            {
                [[maybe_unused]] const auto busy = make_busy(stream.get());  // so that units 1 and 2 still have their slots
                for (std::size_t i = 5; i-- > 0;) {
                    const auto use = sharded.gather(sharded.unit_of(i));
                    detail::passes_of(comm).copy(sharded.parameter_value(i), sharded.acquire_gradient(i));
                    sharded.mark_ready(i);
                }
            }
            sharded.finish();
            sharded.step();
            const auto use = sharded.gather(0);
            for (std::size_t i = 0; i < 3; ++i)
                findings.check(gradsync_test::read(comm, sharded.parameter_value(i)).back() == 0.5f, "wrong weights");
        }
        comm.set_stream(nullptr);
    };
    on_nccl_ranks(2, [&](NcclBackend comm) { train(comm, [](cudaStream_t stream) { return gradsync_fake::Busy(stream); }); });
    run_threads(2, [&](ThreadBackend host) { train(StagedThreads(host), [](cudaStream_t) { return 0; }); });
}

TEST_CASE("sharding on devices: gradients in another order than the plan's are refused, with what to do") {
    on_nccl_ranks(1, [&](NcclBackend comm) {
        std::vector<gradsync_test::Numbers<NcclBackend>> weights;
        for (int i = 0; i < 4; ++i) weights.emplace_back(10, 1.0f);
        ShardedParameters sharded(comm, views_of(weights), cuda::Sgd(), Units({0, 1, 2, 3}));
        (void)sharded.acquire_gradient(0);
        (void)sharded.acquire_gradient(1);
        CHECK_THROWS_WITH_AS((void)sharded.acquire_gradient(2), doctest::Contains("reverse order of registration"), Error);
    });
}

TEST_CASE("sharding on devices: what the library's optimizers do not take is refused at construction") {
    on_nccl_ranks(1, [&](NcclBackend comm) {
        std::vector<gradsync_test::Numbers<NcclBackend>> weights;
        weights.emplace_back(10, 1.0f, DType::f64);
        CHECK_THROWS_WITH_AS(ShardedOptimizer(comm, views_of(weights), cuda::AdamW()),
                             doctest::Contains("parameter 'p0' has weights or gradients in f64, which the optimizer does not take"), Error);
    });
}

TEST_CASE("sharding on devices refuses shared weights, and an optimizer whose groups do not fit") {
    gradsync_test::run_rank_threads(
        1, [](auto& rendezvous) { return NcclBackend(rendezvous, {}); },
        [&](NcclBackend comm) {
            gradsync_test::Numbers<NcclBackend> floats(100, 1), doubles(100, 1, DType::f64);
            const auto views = [](auto& numbers) {
                return std::vector<ParameterView>{{.name = "w", .value = numbers.view(), .gradient = numbers.view()}};
            };
            CHECK_THROWS_WITH_AS(
                ShardedOptimizer(comm, views(floats), cuda::AdamW(), ShardingOptions{.parameters = ParameterStorage::shared}),
                doctest::Contains("ParameterStorage::shared is for host memory; use in_buckets"), Error);
            CHECK_THROWS_WITH_AS(cuda::AdamW({{}}, {0, 1}), doctest::Contains("a parameter is of group 1, and there are 1"), Error);
        });
}
