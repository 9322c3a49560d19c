// SPDX-License-Identifier: BSL-1.0
// ctest: MPI RANKS 3
// Who did not come, where MPI itself does not say.
#include <gradsync/bootstrap/mpi_rendezvous.hpp>

#include <doctest/doctest.h>

#include <chrono>

#include "conformance/mpi_launcher.hpp"
#include "support/ranks.hpp"

using namespace gradsync;
using namespace gradsync_test;
using namespace std::chrono_literals;

namespace {

/// All ranks but one come to a barrier of a rendezvous of their own; that one comes when they have given up.
void check_missing(MPI_Comm comm, int missing) {
    CAPTURE(missing);
    const int rank = environment().rank;
    MpiRendezvous rendezvous(comm, {.timeout = 1s});
    if (rank != missing) {
        const Outcome outcome = outcome_of([&] { rendezvous.barrier(); });
        INFO(outcome.text);
        REQUIRE(outcome.is(Errc::timeout));
        CHECK(outcome.says("for rank " + std::to_string(missing) + ";"));
        CHECK(outcome.error->context().peer == missing);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == missing) rendezvous.barrier();  // those of the others are still under way
    MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace

TEST_CASE("MpiRendezvous: who does not come is named, whatever was said in earlier ones of the same communicator") {
    (void)environment();
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    for (const int missing : {2, 1, 0, 2}) check_missing(comm, missing);
    MPI_Comm_free(&comm);
}
