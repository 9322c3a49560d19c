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

/// All ranks but one come to an exchange at a rendezvous of their own; that one comes when they have given up.
void check_missing(MPI_Comm comm, int missing) {
    CAPTURE(missing);
    const int rank = environment().rank;
    MpiRendezvous rendezvous(comm, {.timeout = 1s});
    if (rank != missing) {
        const Outcome outcome = outcome_of([&] { (void)rendezvous.all_gather({}); });
        INFO(outcome.text);
        REQUIRE(outcome.is(Errc::timeout));
        CHECK(outcome.says("for rank " + std::to_string(missing) + ";"));
        CHECK(outcome.error->context().peer == missing);
    }
    MpiEnvironment::meet();
    if (rank == missing) {  // the first call of the others' exchange is still under way; they will not make the second one
        ++*bootstrap::last_call_of(comm);
        const int none = 0;
        int counts[3];
        MPI_Request request;
        MPI_Iallgather(&none, 1, MPI_INT, counts, 1, MPI_INT, comm, &request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
    }
    MpiEnvironment::meet();
}

}  // namespace

TEST_CASE("MpiRendezvous names a missing rank, whatever was exchanged earlier on the same communicator") {
    (void)environment();
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    for (const int missing : {2, 1, 0, 2}) check_missing(comm, missing);
    MPI_Comm_free(&comm);
}

TEST_CASE("MpiRendezvous: more bytes than an int counts are counted") {
    constexpr int most = 2147483647;
    List<int> offsets(4);
    CHECK(bootstrap::add_up({1, 2, most, 4}, offsets) == most + std::int64_t{7});
    CHECK(offsets == List<int>{0, 1, 3, most});
}
