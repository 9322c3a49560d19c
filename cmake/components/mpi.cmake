# The component mpi: gradsync::mpi, what programs that use gradsync/backend/mpi.hpp link.

set(MPI_CXX_SKIP_MPICXX ON) # the C interface: the C++ bindings are gone from the standard
find_package(MPI QUIET COMPONENTS CXX)
if(NOT TARGET MPI::MPI_CXX)
  set(gradsync_missing "an MPI for C++ (Debian: libopenmpi-dev openmpi-bin; elsewhere set MPI_HOME or MPI_CXX_COMPILER)")
elseif(NOT TARGET gradsync::mpi)
  add_library(gradsync::mpi INTERFACE IMPORTED GLOBAL)
  target_link_libraries(gradsync::mpi INTERFACE gradsync::gradsync MPI::MPI_CXX)
endif()
