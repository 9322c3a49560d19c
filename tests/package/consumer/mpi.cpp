// SPDX-License-Identifier: BSL-1.0
#include <gradsync/interop/boost_mpi.hpp>

#include <vector>

int main(int argc, char** argv) {
    boost::mpi::environment environment(argc, argv, boost::mpi::threading::multiple, false);  // the only process, if not started by mpirun
    const boost::mpi::communicator world;
    gradsync::MpiBackend comm(world.split(0), {}, boost::mpi::comm_take_ownership);
    std::vector<float> x{1.f};
    comm.all_reduce(gradsync::buffer(x), gradsync::ReduceOp::sum).wait();
    return x[0] == 1.f && world.size() == comm.size() ? 0 : 1;
}
