# SPDX-License-Identifier: BSL-1.0
# The component processes: ranks that are processes, over shared memory and TCP. gradsync::mpi and gradsync::bare_mpi add MPI.

if(NOT TARGET gradsync::processes)
  add_library(gradsync::processes INTERFACE IMPORTED GLOBAL)
  target_link_libraries(gradsync::processes INTERFACE gradsync::gradsync)
endif()
