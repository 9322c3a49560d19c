// SPDX-License-Identifier: BSL-1.0
// gradsync_train --backend mpi: the ranks are the processes that mpirun has started, and this is one of them.

#include <gradsync/backend/mpi.hpp>  // first: it includes mpi.h without the C++ bindings

#include <csignal>

#include <gradsync/gradsync.hpp>

#include "run_process.hpp"

namespace gradsync_train {

int main_over_mpi(int argc, char** argv) {
    std::signal(SIGPIPE, SIG_IGN);  // which Open MPI's TCP raises where the process at the other end has died
    int provided = 0;               // any level will do: with less than MPI_THREAD_MULTIPLE this thread alone communicates
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const int code = run_process(
        rank, argc, argv, [] { return gs::MpiRendezvous(MPI_COMM_WORLD); },
        [](gs::MpiRendezvous&, const Options& o) {
            return gs::MpiBackend(MPI_COMM_WORLD,
                                  {.timeout = time_limit(o), .shared_memory = !o.no_shared_memory, .reproducible = o.reproducible});
        });
    MPI_Finalize();
    return code;
}

}  // namespace gradsync_train
