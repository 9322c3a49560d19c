# SPDX-License-Identifier: BSL-1.0
# The component devices: all that a Reducer needs in device memory, gradsync::nccl and gradsync::cuda together.

include(${CMAKE_CURRENT_LIST_DIR}/processes.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/cuda.cmake)
if(TARGET gradsync::cuda)
  include(${CMAKE_CURRENT_LIST_DIR}/nccl.cmake)
endif()
if(TARGET gradsync::cuda AND TARGET gradsync::nccl AND NOT TARGET gradsync::devices)
  add_library(gradsync::devices INTERFACE IMPORTED GLOBAL)
  target_link_libraries(gradsync::devices INTERFACE gradsync::gradsync gradsync::processes gradsync::nccl gradsync::cuda)
endif()
