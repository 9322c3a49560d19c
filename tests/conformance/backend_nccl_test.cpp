// SPDX-License-Identifier: BSL-1.0
// ctest: ALONE LIBRARIES gradsync::nccl gradsync_kernels RANKS 1 2 3 4 SERIAL LABELS gpu COMPILE_OPTIONS -O1
// On a device: as many processes as ranks share it (see support/gpu_ranks.hpp). A program of n ranks runs the suite at n.
#include <gradsync/backend/nccl.hpp>

#include "conformance/backend.hpp"
#include "support/device_memory.hpp"
#include "support/gpu_ranks.hpp"

int prepare_tests() {
    const int code = gradsync_test::fork_ranks();
    if (code < 0) {
        gradsync_test::repetitions = 1;  // a communicator of NCCL's takes long to make
        const int size = gradsync_test::gpu_ranks().size;
        gradsync_test::sizes_here = {.from = size, .to = size};
        gradsync_test::thinning = size == 1 ? 1 : size == 2 ? 8 : 40;  // ranks take turns on the device
    }
    return code;
}

namespace {

struct Devices {
    using Backend = gradsync::NcclBackend;
    using Memory = gradsync_test::DeviceMemory;
    static constexpr int largest = 4;
    static constexpr bool one_order = false;

    static bool here(int rank) { return gradsync_test::gpu_ranks().rank == rank; }

    template <class F>
    static void run(int size, std::chrono::nanoseconds limit, F&& f) {
        REQUIRE(size == gradsync_test::gpu_ranks().size);
        gradsync::NcclBackend backend(gradsync_test::gpu_ranks().rendezvous, {.timeout = gradsync_test::ample});
        backend.barrier().wait();                              // NCCL connects at the first collective, which takes longer than some limits
        gradsync_test::gpu_ranks().rendezvous.all_gather({});  // nobody fails while another one's device is not done with it
        backend.set_timeout(limit);
        try {
            f(gradsync::NcclBackend(backend));
        } catch (const gradsync::Error& error) {
            backend.fail(error.what());
            if (const int peer = error.context().peer; peer < 0 || here(peer)) throw;  // what another is blamed for leaves `run` there
        } catch (const std::exception& error) {
            backend.fail(error.what());
            throw;
        } catch (...) {
            backend.fail("an exception that is no std::exception");
            throw;
        }
    }
};

}  // namespace

TEST_CASE("NcclBackend gives the results of the oracle") { gradsync_test::check_results<Devices>(); }
TEST_CASE("NcclBackend keeps collectives in flight") { gradsync_test::check_in_flight<Devices>(); }
TEST_CASE("NcclBackend splits into groups") { gradsync_test::check_groups<Devices>(); }
TEST_CASE("NcclBackend reports failures on every rank") { gradsync_test::check_failures<Devices>(); }
TEST_CASE("NcclBackend has the abilities that it states") { gradsync_test::check_abilities<Devices>(); }
