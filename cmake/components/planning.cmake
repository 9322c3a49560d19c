# SPDX-License-Identifier: BSL-1.0
# The component planning: the headers of gradsync/planning/. Simulated ranks and traces use parts of processes.

include(${CMAKE_CURRENT_LIST_DIR}/processes.cmake)
if(NOT TARGET gradsync::planning)
  add_library(gradsync::planning INTERFACE IMPORTED GLOBAL)
  target_link_libraries(gradsync::planning INTERFACE gradsync::gradsync gradsync::processes)
endif()
