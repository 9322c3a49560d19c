# gradsync_add_test(NAME SOURCES FILE... [RANKS N...] [MPI] [TIMEOUT SECONDS] [LABELS LABEL...] [LIBRARIES TARGET...]
#                   [PROCESSORS N] [SERIAL] [COMPILE_OPTIONS OPTION...])
#
# Builds a doctest program (with tests/main.cpp) and registers it with ctest as NAME. With RANKS it is registered once
# for each count, as NAME.ranksN, and finds N in the environment variable GRADSYNC_TEST_RANKS.
#
#   MPI         links MPI, and runs as so many processes under mpiexec
#   TIMEOUT     60 by default; multiplied by GRADSYNC_TEST_TIMEOUT_FACTOR. Just before it a hanging program names the
#               test case that it is in, and exits
#   PROCESSORS  how many cores ctest -j reckons with; 1 by default, with RANKS that count
#   SERIAL      no other test runs at the same time (for what measures time)
#
# gradsync_add_test_file(PREFIX FILE [the same options, as defaults])
#
# One test program from one file below tests/: unit/core/bfloat16_test.cpp becomes the test unit.core.bfloat16. The
# file may state options of its own in a comment line:   // ctest: TIMEOUT 120 LABELS slow

# What Open MPI asks for to run as root in a container, with more ranks than cores.
set(gradsync_mpi_test_environment OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
                                  OMPI_MCA_hwloc_base_binding_policy=none)

set(GRADSYNC_TEST_TIMEOUT_FACTOR 1 CACHE STRING "Every test's time limit is multiplied by this whole number")

function(gradsync_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "SERIAL;MPI" "TIMEOUT;PROCESSORS" "SOURCES;RANKS;LABELS;LIBRARIES;COMPILE_OPTIONS")
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_SOURCES)
    message(FATAL_ERROR "gradsync_add_test(${name}): give SOURCES; not understood: '${arg_UNPARSED_ARGUMENTS}'")
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 60)
  endif()
  math(EXPR limit "${arg_TIMEOUT} * ${GRADSYNC_TEST_TIMEOUT_FACTOR}")
  math(EXPR hard_limit "${limit} + 5")

  string(REPLACE "." "_" target ${name})
  set(target ${target}_test)
  add_executable(${target} ${arg_SOURCES})
  target_link_libraries(${target} PRIVATE gradsync_test_main gradsync_test_support gradsync_warnings ${arg_LIBRARIES})
  target_compile_options(${target} PRIVATE ${arg_COMPILE_OPTIONS})
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/bin)

  if(arg_MPI)
    target_link_libraries(${target} PRIVATE gradsync::mpi)
  endif()
  set(counts ${arg_RANKS})
  if(NOT counts)
    set(counts none)
  endif()
  foreach(count IN LISTS counts)
    set(test ${name})
    set(environment GRADSYNC_TEST_TIMEOUT=${limit})
    set(processors 1)
    set(launcher)
    if(NOT count STREQUAL "none")
      set(test ${name}.ranks${count})
      list(APPEND environment GRADSYNC_TEST_RANKS=${count})
      set(processors ${count})
      if(arg_MPI)
        set(launcher ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${count})
        list(APPEND environment ${gradsync_mpi_test_environment})
      endif()
    endif()
    if(arg_PROCESSORS)
      set(processors ${arg_PROCESSORS})
    endif()
    add_test(NAME ${test} COMMAND ${launcher} $<TARGET_FILE:${target}>)
    set_tests_properties(
      ${test} PROPERTIES TIMEOUT ${hard_limit} ENVIRONMENT "${environment}" LABELS "${arg_LABELS}"
                         PROCESSORS ${processors} RUN_SERIAL ${arg_SERIAL} SKIP_RETURN_CODE 77)
  endforeach()
endfunction()

function(gradsync_add_test_file prefix file)
  file(RELATIVE_PATH name ${PROJECT_SOURCE_DIR}/tests/${prefix} ${file})
  string(REGEX REPLACE "_test\\.cpp$" "" name ${name})
  string(REPLACE "/" "." name ${prefix}/${name})

  file(STRINGS ${file} options REGEX "^// ctest: ")
  if(options)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
    string(REGEX REPLACE "// ctest: " "" options "${options}")
    separate_arguments(options)
  endif()
  # The file's options come last; where a keyword stands twice, the last one counts.
  gradsync_add_test(${name} SOURCES ${file} ${ARGN} ${options})
endfunction()
