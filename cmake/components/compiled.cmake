# SPDX-License-Identifier: BSL-1.0
# The component compiled: gradsync::compiled, which programs of several files link instead of gradsync::gradsync. The API is the same. What
# takes longest to compile is compiled once, with the flags of the project that uses it, when a target needs it first. Programs here whose
# ranks are only threads link the part without processes, gradsync_compiled_threads.

if(NOT TARGET gradsync::compiled)
  get_target_property(gradsync_include gradsync::gradsync INTERFACE_INCLUDE_DIRECTORIES)
  find_path(gradsync_sources gradsync/compiled.cpp PATHS ${CMAKE_CURRENT_LIST_DIR}/../../include ${gradsync_include} NO_DEFAULT_PATH NO_CACHE REQUIRED)
  add_library(gradsync_compiled_threads STATIC EXCLUDE_FROM_ALL ${gradsync_sources}/gradsync/compiled.cpp)
  target_link_libraries(gradsync_compiled_threads PUBLIC gradsync::gradsync)
  target_compile_definitions(gradsync_compiled_threads INTERFACE GRADSYNC_COMPILED)
  add_library(gradsync_compiled STATIC EXCLUDE_FROM_ALL ${gradsync_sources}/gradsync/compiled_tcp.cpp)
  add_library(gradsync::compiled ALIAS gradsync_compiled)
  target_link_libraries(gradsync_compiled PUBLIC gradsync_compiled_threads)
  target_compile_options(gradsync_compiled_threads PRIVATE $<TARGET_PROPERTY:gradsync_compiled,COMPILE_OPTIONS>)
  set_target_properties(gradsync_compiled_threads gradsync_compiled PROPERTIES POSITION_INDEPENDENT_CODE ON)
endif()
