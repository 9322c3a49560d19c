// SPDX-License-Identifier: BSL-1.0
// Another MPI's MPI_Allreduce: see peer_under_mpi.hpp.

#include "../mpi_library.hpp"
#include "peer_under_mpi.hpp"

int main(int argc, char** argv) {
    return bench::main_of_peer(argc, argv, [](const bench::MpiRanks&, void* buffer, std::size_t bytes) {
        return bench::MpiLibrary("all_reduce", gradsync::DType::f32, buffer, bytes);
    });
}
