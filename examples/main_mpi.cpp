// SPDX-License-Identifier: BSL-1.0
// gradsync_train --backend mpi: the ranks are the processes that mpirun has started, and this is one of them.

#include <gradsync/interop/boost_mpi.hpp>  // first: it includes mpi.h without the C++ bindings

#include <csignal>

#include <gradsync/gradsync.hpp>

#include "run_process.hpp"

namespace gradsync_train {

namespace {

struct MpiProcess {
    const boost::mpi::communicator& world;

    int rank() const { return world.rank(); }
    int size() const { return world.size(); }
    gs::MpiRendezvous meet(std::chrono::nanoseconds limit) const { return gs::MpiRendezvous(world, {.timeout = limit}); }
    gs::MpiBackend connect(gs::MpiRendezvous&, const Options& o) const {
        return gs::MpiBackend(world, {.timeout = time_limit(o), .shared_memory = !o.no_shared_memory});
    }
    static MakeKeeper keeper(gs::MpiBackend&) { return nullptr; }
    static bool goes_on(const gs::Error&) { return false; }
    static bool is_over() { return false; }
    static void end(gs::MpiBackend& comm) { comm.barrier().wait(); }
};

}  // namespace

int main_over_mpi(int argc, char** argv) {
    std::signal(SIGPIPE, SIG_IGN);  // which Open MPI's TCP raises where the process at the other end has died
    return exit_code_of([&] {
        return gs::with_typed_errors([&] {
            // Any level will do: with less than threading::multiple this thread alone communicates. After a failure run_process ends the
            // process, as the environment's MPI_Finalize would wait for the others.
            const boost::mpi::environment environment(argc, argv, boost::mpi::threading::multiple, false);
            const boost::mpi::communicator world;
            return run_process(MpiProcess{world}, argc, argv);
        });
    });
}

}  // namespace gradsync_train
