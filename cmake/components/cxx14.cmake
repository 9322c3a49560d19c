# SPDX-License-Identifier: BSL-1.0
# The component cxx14: gradsync::cxx14, which programs that include gradsync/cxx14.hpp link. It leaves their language standard as it is; the
# library itself is compiled as C++20, once.

include(${CMAKE_CURRENT_LIST_DIR}/compiled.cmake)
if(NOT TARGET gradsync::cxx14)
  get_target_property(gradsync_include gradsync::gradsync INTERFACE_INCLUDE_DIRECTORIES)
  find_path(gradsync_cxx14_sources gradsync/compiled_cxx14.cpp PATHS ${CMAKE_CURRENT_LIST_DIR}/../../include ${gradsync_include} NO_DEFAULT_PATH NO_CACHE REQUIRED)
  add_library(gradsync_cxx14 STATIC EXCLUDE_FROM_ALL ${gradsync_cxx14_sources}/gradsync/compiled_cxx14.cpp)
  add_library(gradsync::cxx14 ALIAS gradsync_cxx14)
  target_link_libraries(gradsync_cxx14 PRIVATE gradsync::compiled)
  target_include_directories(gradsync_cxx14 SYSTEM INTERFACE ${gradsync_cxx14_sources})
  set_target_properties(gradsync_cxx14 PROPERTIES POSITION_INDEPENDENT_CODE ON)
endif()
