// SPDX-License-Identifier: BSL-1.0
// expect: MpiBackend: whether this object frees its MPI_Comm is not known here
// expect: for a boost::mpi::communicator include <gradsync/interop/boost_mpi.hpp>, otherwise pass the MPI_Comm
// errors: 1
#include <gradsync/backend/mpi.hpp>

/// Frees its communicator itself, as a boost::mpi::communicator may.
struct Communicator {
    operator MPI_Comm() const;
};

void use(const Communicator& comm) {
#ifdef GRADSYNC_EXPECT_FAILURE
    gradsync::MpiBackend backend(comm, {}, gradsync::MpiCommunicator::take_ownership);
#else
    gradsync::MpiBackend first(comm);  // in a duplicate
    gradsync::MpiBackend second(static_cast<MPI_Comm>(comm), {}, gradsync::MpiCommunicator::attach);
#endif
}
