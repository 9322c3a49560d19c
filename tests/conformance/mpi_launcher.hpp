// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <type_traits>
#include <utility>

#include <unistd.h>

#include <gradsync/backend/mpi.hpp>
#include <gradsync/backend/tcp.hpp>

#include "conformance/backend/launcher.hpp"

namespace gradsync_test {

/// MPI, for as long as the program runs.
struct MpiEnvironment {
    int rank = 0, size = 1;
    MpiEnvironment() {
        MPI_Init(nullptr, nullptr);
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &size);
        sizes_here.from = std::min(size, 3);  // MpiBackend has programs of 1 and 2 ranks; TcpBackend runs at these over threads
    }
    ~MpiEnvironment() {
        meet();
        MPI_Finalize();
    }
    /// Waits for all processes in naps: the waits of an MPI may keep the core that the others need.
    static void meet() {
        const auto begun = std::chrono::steady_clock::now();
        MPI_Request request;
        MPI_Ibarrier(MPI_COMM_WORLD, &request);
        for (int over = 0; MPI_Test(&request, &over, MPI_STATUS_IGNORE), over == 0;)
            if (std::chrono::steady_clock::now() - begun > std::chrono::milliseconds(1)) ::usleep(200);
    }
};
inline MpiEnvironment& environment() {
    static MpiEnvironment only;
    return only;
}

/// How the ranks reach one another: all share memory, none do, or each half of them does (two machines; of 3 ranks two run
/// on one); or they run on two machines in turns, and none can.
enum class Reach { memory, messages, both, in_turns };

/// Runs the suite on the processes of one mpirun, which all run the same test cases. For `B` that is TcpBackend, MPI serves as their
/// rendezvous only.
template <Reach reach, class B = gradsync::MpiBackend>
struct MpiProcessesWith {
    using Backend = B;
    using Memory = HostMemory;
    static constexpr bool one_order = true;

    static inline const int largest = environment().size;

    static bool here(int rank) { return environment().rank == rank; }

    template <class F>
    static void run(int size, std::chrono::nanoseconds limit, F&& f) {
        const bool member = environment().rank < size;
        environment().meet();
        MPI_Comm comm = MPI_COMM_NULL;
        MPI_Comm_split(MPI_COMM_WORLD, member ? 0 : 1, environment().rank, &comm);
        if (member) {
            B backend = make(comm, limit, size);
            MPI_Comm_free(&comm);
            try {
                f(B(backend));
            } catch (const gradsync::Error& error) {
                backend.fail(error.what());
                // What another rank is blamed for leaves `run` there.
                if (const int peer = error.context().peer; peer < 0 || here(peer)) throw;
            } catch (const std::exception& error) {
                backend.fail(error.what());
                throw;
            } catch (...) {
                backend.fail("an exception that is no std::exception");
                throw;
            }
        } else {
            MPI_Comm_free(&comm);
        }
    }

private:
    static B make(MPI_Comm comm, std::chrono::nanoseconds limit, int size) {
        gradsync::ProcessOptions options{.timeout = limit, .shared_memory = reach != Reach::messages};
        if (reach == Reach::both) options.domain = 2 * environment().rank / size;
        if (reach == Reach::in_turns) options.domain = environment().rank % 2;
        if constexpr (std::is_same_v<B, gradsync::MpiBackend>) {
            return B(comm, options);
        } else {
            gradsync::MpiRendezvous rendezvous(comm);
            return B(rendezvous, options);
        }
    }
};
using MpiProcesses = MpiProcessesWith<Reach::memory>;
using MpiMessengers = MpiProcessesWith<Reach::messages>;
using MpiMachines = MpiProcessesWith<Reach::both>;
using MpiInTurns = MpiProcessesWith<Reach::in_turns>;

}  // namespace gradsync_test
