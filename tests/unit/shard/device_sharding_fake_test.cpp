// SPDX-License-Identifier: BSL-1.0
// ctest: LIBRARIES gradsync_fake_nccl gradsync_fake_passes COST 20
// Sharded training in device memory, over the fakes of support/fake: what it does on ThreadBackend, it does there.
#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>

#include <doctest/doctest.h>

#include <string_view>
#include <vector>

#include "support/device_sharding.hpp"
#include "support/fake/fake.hpp"
#include "support/ranks_on_fakes.hpp"
#include "support/slow_build.hpp"
#include "support/temporary_directory.hpp"

using namespace gradsync;
using gradsync_test::on_devices;
using gradsync_test::on_host;
using gradsync_test::ShardedCase;
using gradsync_test::ShardedTraining;
using gradsync_test::staged;

using Staged = StagingBackend<ThreadBackend>;

int prepare_tests() {
    gradsync_fake::connect_late();
    return -1;
}

TEST_CASE("sharding on devices: it trains as it does on the host") {
    for (const ShardedCase& what : gradsync_test::sharded_cases())
        for (const int size : gradsync_test::rank_counts()) {
            if (what.per_group != 0 && size % what.per_group != 0) continue;
            const std::string_view name = what.name;
            CAPTURE(name);
            CAPTURE(size);
            const auto train = [&]<class B>(B comm) { return ShardedTraining<B>(comm, what).run(); };
            const std::vector<float> expected = on_host(size, train);
            CHECK(staged(size, train) == expected);
            const std::vector<float> there = on_devices(size, train);
            if (size < 3 && what.dtype == DType::f32) CHECK(there == expected);  // there is only one order
            else CHECK(gradsync_test::distance(there, expected) < what.tolerance());
        }
}

TEST_CASE("sharding on devices: micro-batches that are counted, on any number of ranks") {
    for (const int size : gradsync_test::rank_counts())
        for (std::size_t all = static_cast<std::size_t>(size); all < 15; ++all) {
            CAPTURE(size);
            CAPTURE(all);
            const Deal deal{all, size, true};
            const auto train = [&]<class B>(B comm) {  // steps to minus the mean of 1, 2, ...
                gradsync_test::Numbers<B> weight(1000, 0);
                ParameterView view{.name = "w", .value = weight.view(), .gradient = weight.view()};
                view.gradient.data = nullptr;
                ShardedOptimizer sharded(comm, {view}, cuda::Sgd({.learning_rate = 1, .momentum = 0}),
                                         ShardingOptions{.reducer = {.accumulation = Accumulation::in_buckets, .micro_batches = all}},
                                         Zero2{});
                for (std::size_t turn = 0; turn < deal.rounds(); ++turn) {
                    const bool has_batch = turn < deal.count(comm.rank());
                    (void)sharded.begin_step(has_batch);
                    if (has_batch) {
                        const float gradient = static_cast<float>(deal.number(comm.rank(), turn) + 1);
                        gradsync_test::write(comm, sharded.acquire_gradient(0), std::vector<float>(1000, gradient));
                        sharded.mark_ready(0);
                    }
                    sharded.finish();
                }
                sharded.step();
                return gradsync_test::read(comm, weight.view());
            };
            const std::vector<float> expected(1000, static_cast<float>(all + 1) * -0.5f);
            CHECK(gradsync_test::distance(staged(size, train), expected) < 1e-6f);
            CHECK(gradsync_test::distance(on_devices(size, train), expected) < 1e-6f);
        }
}

TEST_CASE("sharding on devices: the host reads a device's checkpoint, and a device the host's") {
    const ShardedCase first{.name = "stage 1"}, then{.name = "stage 3", .stage = 3};
    const gradsync_test::TemporaryDirectory of_host, of_device;
    (void)on_host(3, [&](ThreadBackend comm) { return ShardedTraining<ThreadBackend>(comm, first, of_host.path()).run(); });
    (void)staged(3, [&](Staged comm) { return ShardedTraining<Staged>(comm, first, of_device.path()).run(); });
    const auto go_on = [&](const auto& path) { return [&]<class B>(B comm) { return ShardedTraining<B>(comm, then, {}, path).run(); }; };
    const std::vector<float> expected = on_host(2, go_on(of_host.path()));
    CHECK(on_host(2, go_on(of_device.path())) == expected);
    CHECK(staged(2, go_on(of_host.path())) == expected);
    CHECK(on_devices(2, go_on(of_device.path())) == expected);
}

TEST_CASE("sharding on devices: a step keeps no host waiting for the device") {
    gradsync_test::Findings findings;
    gradsync_test::run_rank_threads(
        2, [](auto& rendezvous) { return NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60)}); },
        [&](NcclBackend comm) {
            const cuda::Stream stream = cuda::make_stream();
            comm.set_stream(stream.get());
            gradsync_test::check_that_sharding_keeps_no_host(comm, stream.get(), [&](const char* what, auto&& steps) {
                {
                    const gradsync_fake::Busy forward(stream.get());
                    steps();
                    findings.check(cudaStreamQuery(stream.get()) == cudaErrorNotReady, what);
                }
                cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
            });
        });
    CHECK(gradsync_fake::misuses() == 0);
}

TEST_CASE("sharding on devices: what is refused") {
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
