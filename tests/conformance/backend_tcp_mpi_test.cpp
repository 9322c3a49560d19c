// SPDX-License-Identifier: BSL-1.0
// ctest: MPI RANKS 4 TIMEOUT 900 COST 25
// TcpBackend's ranks as processes, which share memory: mpirun starts them, and MPI is their rendezvous, no more.
#include <string>

#include "conformance/backend.hpp"
#include "conformance/mpi_launcher.hpp"

using gradsync_test::Reach;
using TcpProcesses = gradsync_test::MpiProcessesWith<Reach::memory, gradsync::TcpBackend>;
using TcpMachines = gradsync_test::MpiProcessesWith<Reach::both, gradsync::TcpBackend>;
using TcpInTurns = gradsync_test::MpiProcessesWith<Reach::in_turns, gradsync::TcpBackend>;

TEST_CASE("TcpBackend gives the results of the oracle") { gradsync_test::check_results<TcpProcesses>(); }
TEST_CASE("TcpBackend keeps collectives in flight") { gradsync_test::check_in_flight<TcpProcesses>(); }
TEST_CASE("TcpBackend splits into groups") { gradsync_test::check_groups<TcpProcesses>(); }
TEST_CASE("TcpBackend reports failures on every rank") { gradsync_test::check_failures<TcpProcesses>(); }
TEST_CASE("TcpBackend has the abilities that it states") { gradsync_test::check_abilities<TcpProcesses>(); }

TEST_CASE("TcpBackend on two machines gives the results of the oracle") { gradsync_test::check_results<TcpMachines>(); }
TEST_CASE("TcpBackend on two machines keeps collectives in flight") { gradsync_test::check_in_flight<TcpMachines>(); }
TEST_CASE("TcpBackend on two machines splits into groups") { gradsync_test::check_groups<TcpMachines>(); }
TEST_CASE("TcpBackend on two machines reports failures on every rank") { gradsync_test::check_failures<TcpMachines>(); }
TEST_CASE("TcpBackend on two machines has the abilities that it states") { gradsync_test::check_abilities<TcpMachines>(); }

TEST_CASE("TcpBackend on two machines in turns gives the results of the oracle") { gradsync_test::check_results<TcpInTurns>(); }

TEST_CASE("TcpBackend: describe() says how the ranks reach one another, and it asks for a progress thread between machines only") {
    const auto described = [&]<class Launcher>(Launcher, int size) {
        std::string description;
        Launcher::run(size, gradsync_test::ample,
                      [&](gradsync::TcpBackend comm) { description = comm.describe() + (comm.wants_progress_thread() ? "; thread" : ""); });
        return description;
    };
    const int rank = gradsync_test::environment().rank;
    CHECK(described(TcpProcesses{}, 4) == "4 processes that share memory");
    CHECK(described(TcpMachines{}, 4) ==
          "4 processes on 2 machines that share memory on each machine, and send messages over TCP between them; thread");
    const std::string three = described(TcpMachines{}, 3);
    if (rank < 3)
        CHECK(three == "3 processes on 2 machines that share memory on each machine, and send messages over TCP between them; thread");
    CHECK(
        described(TcpInTurns{}, 4) ==
        "4 processes on 2 machines that send messages over TCP (ranks of a machine cannot reduce first; number ranks machine by machine, a "
        "power of two on each); thread");
}
