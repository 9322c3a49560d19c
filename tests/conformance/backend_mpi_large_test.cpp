// SPDX-License-Identifier: BSL-1.0
// ctest: MPI RANKS 2 TIMEOUT 900 NIGHTLY
#include <cstddef>
#include <cstring>

#include <gradsync/backend/mpi.hpp>

#include "conformance/backend.hpp"
#include "conformance/mpi_launcher.hpp"
#include "support/available_memory.hpp"

using gradsync_test::MpiMessengers;
using gradsync_test::MpiProcesses;

TEST_CASE("MpiBackend reduces more elements than an int can count") {
    // Both ranks ask for the same machine, at about the same time: rank 0 decides.
    int enough = gradsync_test::available_memory() > (std::size_t{6} << 30);
    MPI_Bcast(&enough, 1, MPI_INT, 0, MPI_COMM_WORLD);
    if (!enough) {
        MESSAGE("left out: it takes 6 GiB of memory");
        return;
    }
    const std::size_t count = (std::size_t{1} << 31) + 4097;
    const auto all_are = [&](const gradsync::kernel::HostBuffer& buffer, unsigned char value) {
        const auto* const bytes = static_cast<const unsigned char*>(buffer.data());
        return bytes[0] == value && std::memcmp(bytes, bytes + 1, count - 1) == 0;
    };
    const auto reduce = [&](gradsync::MpiBackend comm) {
        const gradsync::kernel::HostBuffer buffer(count);
        std::memset(buffer.data(), 3 + comm.rank(), count);
        comm.all_reduce({buffer.data(), count, gradsync::DType::u8}, gradsync::ReduceOp::sum).wait();
        CHECK(all_are(buffer, 7));
    };
    MpiProcesses::run(2, gradsync_test::ample, reduce);
    MpiMessengers::run(2, gradsync_test::ample, reduce);
}
