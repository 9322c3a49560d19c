// SPDX-License-Identifier: BSL-1.0
// ctest: SANITIZED LIBRARIES gradsync_fake_nccl gradsync_fake_passes TIMEOUT 900 COST 35
// NcclBackend under the suite that every backend passes, over a CUDA runtime and an NCCL of our own (support/fake): its own order
// of calls, waits, failures and aborts, without a device. backend_nccl_test.cpp runs it on one.
#include <gradsync/backend/nccl.hpp>

#include "conformance/backend.hpp"
#include "support/device_memory.hpp"
#include "support/fake/fake.hpp"
#include "support/rank_threads.hpp"

int prepare_tests() {
    gradsync_test::thinning *= 4;  // each collective over the fakes takes its threads many turns
    return -1;
}

namespace {

/// `looks`: for how many looks each call of NCCL's is in progress.
template <int looks, gradsync::NcclMemory memory = gradsync::NcclMemory::plain>
struct FakeDevices {
    using Backend = gradsync::NcclBackend;
    using Memory = gradsync_test::DeviceMemory;
    static constexpr int largest = 4;
    static constexpr bool one_order = false;

    static bool here(int) { return true; }

    template <class F>
    static void run(int size, std::chrono::nanoseconds limit, F&& f) {
        gradsync_fake::be_slow(looks);
        gradsync_test::run_rank_threads(
            size, [&](auto& rendezvous) { return gradsync::NcclBackend(rendezvous, {.timeout = limit, .memory = memory}); }, f);
        CHECK(gradsync_fake::misuses() == 0);
    }
};

}  // namespace

TEST_CASE("NcclBackend over a fake gives the results of the oracle") { gradsync_test::check_results<FakeDevices<0>>(); }
TEST_CASE("NcclBackend over a fake keeps collectives in flight") { gradsync_test::check_in_flight<FakeDevices<3>>(); }
TEST_CASE("NcclBackend over a fake splits into groups") { gradsync_test::check_groups<FakeDevices<2, gradsync::NcclMemory::windows>>(); }
TEST_CASE("NcclBackend over a fake reports failures on every rank") { gradsync_test::check_failures<FakeDevices<1>>(); }
TEST_CASE("NcclBackend over a fake has the abilities that it states") { gradsync_test::check_abilities<FakeDevices<1>>(); }
