// SPDX-License-Identifier: BSL-1.0
// ctest: LIBRARIES gradsync_fake_nccl
// A program without the library's kernels: everything works but means, which say what is missing.
#include <gradsync/backend/nccl.hpp>

#include <cstring>
#include <string>

#include <gradsync/average.hpp>

#include "conformance/backend/launcher.hpp"
#include "support/device_memory.hpp"
#include "support/rank_threads.hpp"

TEST_CASE("NcclBackend without kernels: sums work, means are refused where they are called") {
    using namespace std::chrono_literals;
    gradsync_test::Findings findings;
    gradsync_test::run_rank_threads(
        2, [](auto& rendezvous) { return gradsync::NcclBackend(rendezvous, {.timeout = 60s}); },
        [&](gradsync::NcclBackend comm) {
            gradsync_test::DeviceMemory data(std::vector<std::byte>(40, std::byte{0}));
            const gradsync::BufferView view{data.data(), 10, gradsync::DType::f32, gradsync::MemorySpace::device};
            const auto error = gradsync_test::error_of([&] { comm.all_reduce(view, gradsync::ReduceOp::mean).wait(); });
            findings.check(
                error && error->errc() == gradsync::Errc::invalid_argument && gradsync_test::mentions(*error, "link gradsync::cuda"),
                error ? error->what() : "nothing was thrown");
            comm.all_reduce(view, gradsync::ReduceOp::sum).wait();
            gradsync::sum(comm, view.subview(0, 4), view.subview(4, 6));  // in device memory each tensor travels alone
            comm.barrier().wait();
        });
    CHECK(!gradsync::cuda::linked());
}
