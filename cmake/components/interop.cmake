# SPDX-License-Identifier: BSL-1.0
# The component interop: the headers of gradsync/interop/. A program also links the library whose tensors or communicators it has.

include(${CMAKE_CURRENT_LIST_DIR}/processes.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/sharding.cmake)
if(NOT TARGET gradsync::interop)
  add_library(gradsync::interop INTERFACE IMPORTED GLOBAL)
  target_link_libraries(gradsync::interop INTERFACE gradsync::gradsync gradsync::processes gradsync::sharding)
endif()
