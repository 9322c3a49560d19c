# SPDX-License-Identifier: BSL-1.0
# The component bare_mpi: gradsync::bare_mpi, which programs that include gradsync/backend/mpi.hpp link if they use no Boost.MPI.

set(MPI_CXX_SKIP_MPICXX ON) # the C interface: the C++ bindings are gone from the standard
find_package(MPI QUIET COMPONENTS CXX)
# CMake 3.25 defines MPI::MPI_CXX even where it found no MPI. MPI_CXX_FOUND says that a program was compiled and linked.
if(NOT MPI_CXX_FOUND)
  set(gradsync_missing "an MPI for C++ (Debian: apt-get install libopenmpi-dev openmpi-bin; elsewhere set MPI_HOME or MPI_CXX_COMPILER)")
elseif(NOT TARGET gradsync::bare_mpi)
  add_library(gradsync::bare_mpi INTERFACE IMPORTED GLOBAL)
  target_link_libraries(gradsync::bare_mpi INTERFACE gradsync::gradsync MPI::MPI_CXX)
endif()
