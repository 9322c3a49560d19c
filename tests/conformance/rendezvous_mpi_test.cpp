// SPDX-License-Identifier: BSL-1.0
// ctest: MPI RANKS 1 2 3 4
#include <gradsync/backend/tcp.hpp>
#include <gradsync/bootstrap/mpi_rendezvous.hpp>

#include "conformance/mpi_launcher.hpp"
#include "conformance/rendezvous.hpp"

TEST_CASE("MpiRendezvous is a rendezvous") {
    const auto& world = gradsync_test::environment();
    gradsync::MpiRendezvous rendezvous(MPI_COMM_WORLD);
    CHECK(gradsync_test::use_rendezvous(rendezvous, world.rank, world.size) == "");

    gradsync::TcpBackend comm(rendezvous);
    std::vector<double> data(1000, world.rank + 1);
    comm.all_reduce(gradsync::buffer(data), gradsync::ReduceOp::sum).wait();
    CHECK(data[999] == world.size * (world.size + 1) / 2);
    gradsync_test::MpiEnvironment::meet();
}
