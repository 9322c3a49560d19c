// SPDX-License-Identifier: BSL-1.0
// ctest: ALONE LIBRARIES gradsync_device_support gradsync::nccl gradsync_kernels RANKS 1 2 3 4 SERIAL LABELS gpu COMPILE_OPTIONS -O0
// On a device: sharded training there does what it does on the host. The ranks are processes that share the device (see
// support/gpu_ranks.hpp); making their communicators takes seconds, so several ranks run fewer cases.
#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/tcp.hpp>
#include <gradsync/backend/thread_backend.hpp>

#include <doctest/doctest.h>

#include <cstring>
#include <string_view>
#include <vector>

#include "support/device_sharding.hpp"
#include "support/gate.hpp"
#include "support/gpu_ranks.hpp"

using namespace gradsync;
using gradsync_test::sharded_training;
using gradsync_test::ShardedCase;

int prepare_tests() { return gradsync_test::fork_ranks(); }

namespace {

/// What every rank of `comm` has, if it is the same.
std::vector<float> agreed(TcpBackend& host, std::vector<float> own) {
    std::vector<float> first = own;
    host.broadcast(buffer(first), 0).wait();
    CHECK(std::memcmp(first.data(), own.data(), own.size() * sizeof(float)) == 0);
    return own;
}

std::vector<float> on_host(const ShardedCase& what) {
    return run_threads(gradsync_test::gpu_ranks().size, [&](ThreadBackend comm) { return sharded_training(comm, what); }).front();
}

}  // namespace

TEST_CASE("sharding over NCCL: in a step the host waits for nothing that the device does") {
    NcclBackend comm(gradsync_test::gpu_ranks().rendezvous, {.timeout = std::chrono::seconds(90)});
    const cuda::Stream stream = cuda::make_stream();
    comm.set_stream(stream.get());
    gradsync_test::check_that_sharding_keeps_no_host(comm, stream.get(), [&](const char* what, const auto& steps) {
        CAPTURE(what);
        gradsync_test::Gate gate(stream.get());
        steps();
        CHECK(gate.open());
        cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
    });
}

TEST_CASE("sharding over NCCL trains as it does on the host") {
    NcclBackend comm(gradsync_test::gpu_ranks().rendezvous, {.timeout = std::chrono::seconds(90)});
    const cuda::Stream stream = cuda::make_stream();
    comm.set_stream(stream.get());
    for (const ShardedCase& what : gradsync_test::sharded_cases()) {
        if (what.per_group != 0 && comm.size() % what.per_group != 0) continue;
        const bool few = !what.reduce_dtype && (what.clips || what.accumulates || what.per_group != 0);
        if (comm.size() > 2 && !few) continue;
        const std::string_view name = what.name;
        CAPTURE(name);
        const std::vector<float> there = agreed(comm.host(), sharded_training(comm, what));
        CHECK(gradsync_test::distance(there, on_host(what)) < what.tolerance());
    }
}

TEST_CASE("sharding over staged buffers trains as on the host") {
    TcpBackend host(gradsync_test::gpu_ranks().rendezvous, {.timeout = std::chrono::seconds(90)});
    StagingBackend<TcpBackend> comm(host, {.piece_bytes = 16384});
    for (const ShardedCase& what : gradsync_test::sharded_cases()) {
        if (what.per_group != 0 && comm.size() % what.per_group != 0) continue;
        const std::string_view name = what.name;
        CAPTURE(name);
        const std::vector<float> there = agreed(host, sharded_training(comm, what));
        CHECK(gradsync_test::distance(there, on_host(what)) < what.tolerance());
    }
}
