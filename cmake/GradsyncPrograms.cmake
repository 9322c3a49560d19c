# SPDX-License-Identifier: BSL-1.0
# How this project's own programs (tests, examples, benchmarks) are compiled. Nothing here reaches a user's target.
#
#   gradsync_warnings   our warning flags; errors where GRADSYNC_WERROR is on
#   gradsync_program    what an example or a benchmark links: the library, the warnings, GRADSYNC_NATIVE's flag
#   gradsync_cold       the flag for files that gain nothing from optimisation, and take long to compile

set(GRADSYNC_WARNINGS -Wall -Wextra -Wpedantic -Wshadow -Wconversion)

add_library(gradsync_warnings INTERFACE)
if(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
  target_compile_options(gradsync_warnings INTERFACE ${GRADSYNC_WARNINGS} $<$<BOOL:${GRADSYNC_WERROR}>:-Werror>)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(gradsync_warnings INTERFACE -Wno-restrict) # false alarms in std::string, GCC PR105651
endif()

set(gradsync_cold $<IF:$<BOOL:${GRADSYNC_QUICK_PROGRAMS}>,-O0,-O1>)

add_library(gradsync_program INTERFACE)
target_link_libraries(gradsync_program INTERFACE gradsync::gradsync gradsync_warnings)
if(GRADSYNC_QUICK_PROGRAMS)
  target_link_libraries(gradsync_program INTERFACE gradsync::compiled)
endif()
if(GRADSYNC_NATIVE)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-march=native GRADSYNC_HAS_MARCH_NATIVE)
  if(GRADSYNC_HAS_MARCH_NATIVE)
    target_compile_options(gradsync_program INTERFACE -march=native)
  endif()
endif()
