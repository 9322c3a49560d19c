# SPDX-License-Identifier: BSL-1.0
# The component mpi: gradsync::mpi, MPI and Boost.MPI, which programs that include gradsync/interop/boost_mpi.hpp link.

include(${CMAKE_CURRENT_LIST_DIR}/bare_mpi.cmake)
if(NOT MPI_CXX_FOUND)
  set(gradsync_missing "an MPI for C++ and its Boost.MPI (Debian: apt-get install libopenmpi-dev openmpi-bin libboost-mpi-dev; elsewhere set MPI_HOME or MPI_CXX_COMPILER, and Boost_ROOT)")
elseif(NOT TARGET gradsync::mpi)
  include(${CMAKE_CURRENT_LIST_DIR}/../gradsyncTryProgram.cmake)
  function(gradsync_find_boost_mpi) # a function, so that Boost_FOUND and the like stay as the project has them
    find_package(Boost QUIET CONFIG COMPONENTS mpi)
  endfunction()
  gradsync_find_boost_mpi()
  set(GRADSYNC_BOOST_MPI_WORKS FALSE)
  if(TARGET Boost::mpi)
    # A constructor that takes a handle of MPI does not link if Boost was built for an MPI with other handles.
    gradsync_try_program(GRADSYNC_BOOST_MPI_WORKS
      "#include <boost/mpi/group.hpp>\nint main() { boost::mpi::group none(MPI_GROUP_EMPTY, false); return none.size(); }\n"
      Boost::mpi MPI::MPI_CXX)
  endif()
  if(GRADSYNC_BOOST_MPI_WORKS)
    add_library(gradsync::mpi INTERFACE IMPORTED GLOBAL)
    target_link_libraries(gradsync::mpi INTERFACE gradsync::bare_mpi Boost::mpi)
  else()
    set(gradsync_missing "Boost.MPI, built for the MPI that was found (Debian: apt-get install libboost-mpi-dev; elsewhere set Boost_ROOT); programs with a bare MPI_Comm do without it: the component bare_mpi")
  endif()
endif()
