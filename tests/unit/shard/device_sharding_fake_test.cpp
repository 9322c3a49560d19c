// SPDX-License-Identifier: BSL-1.0
// ctest: SANITIZED ALONE LIBRARIES gradsync_device_support gradsync_fake_nccl gradsync_fake_passes COST 20
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
using gradsync_test::sharded_training;
using gradsync_test::ShardedCase;
using gradsync_test::staged;

using Staged = StagingBackend<ThreadBackend>;

int prepare_tests() {
    gradsync_fake::connect_late();
    return -1;
}

TEST_CASE("sharding on devices trains as it does on the host") {
    for (const ShardedCase& what : gradsync_test::sharded_cases())
        for (const int size : gradsync_test::rank_counts()) {
            if (what.per_group != 0 && size % what.per_group != 0) continue;
            const std::string_view name = what.name;
            CAPTURE(name);
            CAPTURE(size);
            const auto train = [&](auto comm) { return sharded_training(comm, what); };
            const std::vector<float> expected = on_host(size, train);
            CHECK(staged(size, train) == expected);
            const std::vector<float> there = on_devices(size, train);
            if (size < 3 && what.dtype == DType::f32) CHECK(there == expected);  // there is only one order
            else CHECK(gradsync_test::distance(there, expected) < what.tolerance());
        }
}

TEST_CASE("sharding on devices: the host reads a device's checkpoint, and a device the host's") {
    const ShardedCase first{.name = "stage 1"}, then{.name = "stage 3", .stage = 3};
    const gradsync_test::TemporaryDirectory of_host, of_device;
    (void)on_host(3, [&](ThreadBackend comm) { return sharded_training(comm, first, of_host.path()); });
    (void)staged(3, [&](Staged comm) { return sharded_training(comm, first, of_device.path()); });
    const auto go_on = [&](const auto& path) { return [&](auto comm) { return sharded_training(comm, then, {}, path); }; };
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
            gradsync_test::check_that_sharding_keeps_no_host(comm, stream.get(), [&](const char* what, const auto& steps) {
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
