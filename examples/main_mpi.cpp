// SPDX-License-Identifier: BSL-1.0
// gradsync_train --backend mpi: the ranks are the processes that mpirun has started, and this is one of them.

#include <gradsync/interop/boost_mpi.hpp>  // first: it includes mpi.h without the C++ bindings

#include <csignal>

#include <gradsync/gradsync.hpp>

#include "run_process.hpp"

namespace gradsync_train {

int main_over_mpi(int argc, char** argv) {
    std::signal(SIGPIPE, SIG_IGN);  // which Open MPI's TCP raises where the process at the other end has died
    return exit_code_of([&] {
        return gs::with_typed_errors([&] {
            // Any level will do: with less than threading::multiple this thread alone communicates. After a failure run_process ends the
            // process, as the environment's MPI_Finalize would wait for the others.
            const boost::mpi::environment environment(argc, argv, boost::mpi::threading::multiple, false);
            const boost::mpi::communicator world;
            return run_process(
                world.rank(), world.size(), argc, argv,
                [&](std::chrono::nanoseconds limit) { return gs::MpiRendezvous(world, {.timeout = limit}); },
                [&](gs::MpiRendezvous&, const Options& o) {
                    return gs::MpiBackend(world, {.timeout = time_limit(o), .shared_memory = !o.no_shared_memory});
                });
        });
    });
}

}  // namespace gradsync_train
