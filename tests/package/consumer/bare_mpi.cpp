// SPDX-License-Identifier: BSL-1.0
#include <gradsync/backend/mpi.hpp>

#include <vector>

#include <gradsync/gradsync.hpp>
#ifdef BOOST_CONFIG_HPP
#error "a program with a bare MPI_Comm includes Boost"
#endif

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);  // as the only process, if not started by mpirun
    std::vector<float> x{1.f};
    {
        gradsync::MpiBackend comm(MPI_COMM_WORLD);
        comm.all_reduce(gradsync::buffer(x), gradsync::ReduceOp::sum).wait();
    }
    MPI_Finalize();
    return x[0] == 1.f ? 0 : 1;
}
