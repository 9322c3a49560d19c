// SPDX-License-Identifier: BSL-1.0
#pragma once

#ifdef ADOPT_MPI
#include <gradsync/backend/mpi.hpp>
#endif
#include <gradsync/backend/tcp.hpp>
#include <gradsync/gradsync.hpp>

#include <cstdio>
#include <cstdlib>

/// Runs `f(comm)` on each rank, however the program was started, so that the trainers of this folder can be tried over all backends. Returns
/// the exit status.
template <class F>
int on_ranks([[maybe_unused]] int threads, F&& f) {
    try {
#ifdef ADOPT_MPI
        MPI_Init(nullptr, nullptr);
        f(gradsync::MpiBackend(MPI_COMM_WORLD));
        MPI_Finalize();
#else
        if (std::getenv("WORLD_SIZE") != nullptr) f(gradsync::TcpBackend::from_environment());
        else gradsync::run_threads(threads, [&](gradsync::ThreadBackend comm) { f(comm); });
#endif
        return 0;
    } catch (const gradsync::Error& error) {
        std::fprintf(stderr, "%s\n", error.what());
        std::_Exit(1);  // MPI_Finalize would wait for the others
    }
}
