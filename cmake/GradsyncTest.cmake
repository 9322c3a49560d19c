# SPDX-License-Identifier: BSL-1.0
# gradsync_add_tests(PREFIX FILES FILE... DEFAULTS [the options below])
#
# doctest programs (with tests/main.cpp) of files below tests/PREFIX, and a ctest test for each file: unit/core/bfloat16_test.cpp
# is unit.core.bfloat16. The files of a folder that are built in the same way make one program, and all of them compile as one unit:
# they include nearly the same and would instantiate the same templates (GRADSYNC_UNITY_TESTS). So names at namespace scope
# are to be told apart within a folder. A file may state options of its own in a comment line:   // ctest: TIMEOUT 120 LABELS slow
#
#   LIBRARIES TARGET...  left out if one of them is no target, as its package is not installed. A test states every package whose headers it
#                   includes, also through other headers
#   COMPILE_OPTIONS OPTION...
#   TYPE TYPE       left out if the compiler does not know TYPE
#   MPI             links MPI (LIBRARIES gradsync::mpi: Boost.MPI, too), and runs as so many processes under mpiexec; not with sanitizers, which
#                   MPI itself does not pass
#   NOT_WITH SANITIZER...  left out in builds with that sanitizer: address or thread. Tests without threads are NOT_WITH thread
#   ALONE           a program of its own
#   RANKS N...      registered once for each count, as NAME.ranksN; finds N in the environment variable GRADSYNC_TEST_RANKS. Ranks wait
#                   more than they compute: ctest -j reckons with one core, and with two for more than three ranks
#   TIMEOUT SECONDS 300 by default; multiplied by GRADSYNC_TEST_TIMEOUT_FACTOR. Just before it a hanging program names the
#                   test case that it is in, and exits
#   COST SECONDS    about what it takes, if it is more than 10 s: ctest starts the longest tests first
#   SERIAL          no other test runs at the same time (for what measures time)
#   NIGHTLY         left out without GRADSYNC_NIGHTLY_TESTS
#   SANITIZED       the same, except in builds with a sanitizer: those run it for CI
#   LABELS LABEL...
#
# The label quick marks the tests that scripts/test runs: those that need no package but what it installs (MPI and Boost.MPI), so that they are
# the same on every machine. The target gradsync_quick_tests builds their programs. Without GRADSYNC_QUICK_TESTS they are left out.

include(CheckCXXSourceCompiles)
include(${CMAKE_CURRENT_LIST_DIR}/GradsyncNeeds.cmake)

# What Open MPI asks for to run as root in a container, with more ranks than cores.
set(gradsync_mpi_test_environment OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
                                  OMPI_MCA_hwloc_base_binding_policy=none)

set(GRADSYNC_TEST_TIMEOUT_FACTOR 1 CACHE STRING "Every test's time limit is multiplied by this whole number")
option(GRADSYNC_QUICK_TESTS "Also build the tests that scripts/test runs" ON)
option(GRADSYNC_UNITY_TESTS "Compile the tests of a folder together: a quarter of the time for all, more for one that has changed" ON)

add_custom_target(gradsync_quick_tests)

function(gradsync_add_tests prefix)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "FILES;DEFAULTS")
  set(programs)
  foreach(file IN LISTS arg_FILES)
    gradsync_parse_test(${file} ${arg_DEFAULTS})
    gradsync_is_left_out(left_out ${prefix} ${file})
    if(left_out)
      continue()
    endif()
    cmake_path(GET file PARENT_PATH folder)
    set(program ${folder} ${test_LIBRARIES} ${test_COMPILE_OPTIONS})
    if(test_ALONE)
      set(program ${file})
    endif()
    string(SHA1 program "${program}")
    list(APPEND programs ${program})
    list(APPEND files_${program} ${file})
  endforeach()
  list(REMOVE_DUPLICATES programs)
  foreach(program IN LISTS programs)
    gradsync_add_test_program(${prefix} FILES ${files_${program}} DEFAULTS ${arg_DEFAULTS})
  endforeach()
endfunction()

# Whether the test file that has just been parsed is not built here.
function(gradsync_is_left_out result prefix file)
  set(${result} TRUE PARENT_SCOPE)
  if((test_NIGHTLY AND NOT GRADSYNC_NIGHTLY_TESTS) OR (test_QUICK AND NOT GRADSYNC_QUICK_TESTS))
    return()
  endif()
  set(sanitizer)
  if(CMAKE_CXX_FLAGS MATCHES "-fsanitize=[a-z,-]*thread")
    set(sanitizer thread)
  elseif(CMAKE_CXX_FLAGS MATCHES "-fsanitize=")
    set(sanitizer address)
  endif()
  if(sanitizer AND (test_MPI OR sanitizer IN_LIST test_NOT_WITH))
    return()
  elseif(test_SANITIZED AND NOT sanitizer AND NOT GRADSYNC_NIGHTLY_TESTS)
    return()
  endif()
  set(missing ${test_LIBRARIES})
  foreach(library IN LISTS test_LIBRARIES)
    if(TARGET ${library})
      list(REMOVE_ITEM missing ${library})
    endif()
  endforeach()
  if(test_MPI AND NOT MPIEXEC_EXECUTABLE)
    list(APPEND missing mpiexec)
  endif()
  if(test_TYPE AND NOT missing)
    gradsync_knows_type(known ${file})
    if(NOT known)
      set(missing ${test_TYPE})
    endif()
  endif()
  if(NOT missing)
    set(${result} FALSE PARENT_SCOPE)
    return()
  endif()
  gradsync_name_of_test(name ${prefix} ${file})
  list(JOIN missing ", " missing)
  message(STATUS "gradsync: ${name} is left out; it needs ${missing}")
endfunction()

# Whether the compiler knows test_TYPE, which a test may also have from a library.
function(gradsync_knows_type result file)
  set(${result} TRUE PARENT_SCOPE)
  if(NOT test_LIBRARIES)
    file(STRINGS ${file} includes REGEX "^#include <")
    list(JOIN includes "\n" includes)
    list(JOIN test_COMPILE_OPTIONS " " CMAKE_REQUIRED_FLAGS)
    string(MAKE_C_IDENTIFIER "GRADSYNC_HAS_${test_TYPE}" variable)
    check_cxx_source_compiles("${includes}\nusing T = ${test_TYPE};\nint main() { return static_cast<int>(static_cast<T>(0.0f)); }\n" ${variable})
    set(${result} ${${variable}} PARENT_SCOPE)
  endif()
endfunction()

# Stops if a test file includes headers of a package that it does not state. Without this, only machines without that package would notice.
function(gradsync_check_needs file)
  set(cuda gradsync_fake_nccl gradsync::nccl CUDA::toolkit)
  set(nccl gradsync_fake_nccl gradsync::nccl)
  set(nvtx CUDA::nvtx3)
  set(mpi gradsync::bare_mpi)
  set(boost_mpi gradsync::mpi)
  set(eigen Eigen3::Eigen)
  set(torch gradsync_torch)
  set(curl gradsync::etcd)
  gradsync_packages_of(packages ${file})
  foreach(package IN LISTS packages)
    set(stated FALSE)
    foreach(library IN LISTS ${package})
      if(library IN_LIST test_LIBRARIES)
        set(stated TRUE)
      endif()
    endforeach()
    if(NOT stated)
      list(JOIN ${package} ", " libraries)
      message(FATAL_ERROR "${file} includes headers of ${package}, so its line '// ctest:' must state LIBRARIES, one of: ${libraries}"
                          " (gradsync::bare_mpi: MPI)")
    endif()
  endforeach()
endfunction()

# Sets test_* in the caller to what `file` and the defaults say.
macro(gradsync_parse_test file)
  file(STRINGS ${file} options REGEX "^// ctest: ")
  string(REGEX REPLACE "// ctest: " "" options "${options}")
  separate_arguments(options)
  # The file's options come last; where a keyword with one value stands twice, the last one counts, and lists grow.
  cmake_parse_arguments(test "SERIAL;MPI;ALONE;NIGHTLY;SANITIZED" "TIMEOUT;TYPE;COST" "RANKS;LABELS;LIBRARIES;COMPILE_OPTIONS;NOT_WITH"
                        ${ARGN} ${options})
  if(test_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "${file}: not understood: '${test_UNPARSED_ARGUMENTS}'; cmake/GradsyncTest.cmake says what a test can state")
  endif()
  if(test_MPI)
    list(APPEND test_LIBRARIES gradsync::bare_mpi)
  endif()
  set(test_QUICK FALSE)
  gradsync_packages_of(test_PACKAGES ${file})
  list(REMOVE_ITEM test_PACKAGES mpi boost_mpi)
  if(NOT test_PACKAGES AND NOT test_NIGHTLY AND NOT "gradsync_fake_nccl" IN_LIST test_LIBRARIES)
    set(test_QUICK TRUE)
    list(APPEND test_LABELS quick)
  endif()
  gradsync_check_needs(${file})
endmacro()

# One program of files that are built in the same way, and their tests.
function(gradsync_add_test_program prefix)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "FILES;DEFAULTS")
  list(GET arg_FILES 0 first)
  gradsync_parse_test(${first} ${arg_DEFAULTS})
  list(LENGTH arg_FILES count)
  if(count EQUAL 1)
    gradsync_name_of_test(name ${prefix} ${first})
  else()
    cmake_path(GET first PARENT_PATH folder)
    file(RELATIVE_PATH name ${PROJECT_SOURCE_DIR}/tests ${folder})
    string(JOIN "_with_" name ${name} ${test_LIBRARIES})
  endif()
  string(MAKE_C_IDENTIFIER ${name} target)
  if(TARGET ${target}_test) # of other compile options
    string(JOIN "_with_" target ${target} ${test_COMPILE_OPTIONS})
    string(MAKE_C_IDENTIFIER ${target} target)
  endif()
  string(APPEND target _test)

  add_executable(${target} ${arg_FILES})
  target_link_libraries(${target} PRIVATE gradsync_test_main gradsync_test_support gradsync_warnings ${test_LIBRARIES})
  target_compile_options(${target} PRIVATE ${test_COMPILE_OPTIONS})
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/bin
                                             UNITY_BUILD ${GRADSYNC_UNITY_TESTS} UNITY_BUILD_BATCH_SIZE 0)
  foreach(file IN LISTS arg_FILES)
    gradsync_register_test(${target} ${prefix} ${file} ${arg_DEFAULTS})
  endforeach()
endfunction()

function(gradsync_register_test target prefix file)
  gradsync_parse_test(${file} ${ARGN})
  if(options)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  endif()
  if(test_QUICK)
    add_dependencies(gradsync_quick_tests ${target})
  endif()
  gradsync_name_of_test(name ${prefix} ${file})
  set(filter)  # none if the program has one file: its cases may be in a header
  get_target_property(files ${target} SOURCES)
  list(LENGTH files count)
  if(count GREATER 1)
    file(RELATIVE_PATH filter ${PROJECT_SOURCE_DIR}/tests ${file})
    string(PREPEND filter "--source-file=*")
  endif()
  if(NOT test_TIMEOUT)
    set(test_TIMEOUT 300)
  endif()
  math(EXPR limit "${test_TIMEOUT} * ${GRADSYNC_TEST_TIMEOUT_FACTOR}")
  math(EXPR hard_limit "${limit} + 5")
  set(counts ${test_RANKS})
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
      if(count GREATER 3)
        set(processors 2)
      endif()
      if(test_MPI)
        set(launcher ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${count})
        list(APPEND environment ${gradsync_mpi_test_environment})
      endif()
    endif()
    set(cost ${test_COST})
    if(cost) # a test that waits for two cores finds them at the start only
      math(EXPR cost "${cost} * ${processors}")
    endif()
    add_test(NAME ${test} COMMAND ${launcher} ${CMAKE_CROSSCOMPILING_EMULATOR} $<TARGET_FILE:${target}> ${filter})
    set_tests_properties(
      ${test} PROPERTIES TIMEOUT ${hard_limit} ENVIRONMENT "${environment}" LABELS "${test_LABELS}"
                         COST "${cost}" PROCESSORS ${processors} RUN_SERIAL ${test_SERIAL} SKIP_RETURN_CODE 77)
  endforeach()
endfunction()

function(gradsync_name_of_test variable prefix file)
  file(RELATIVE_PATH name ${PROJECT_SOURCE_DIR}/tests/${prefix} ${file})
  string(REGEX REPLACE "_test\\.cpp$" "" name ${name})
  string(REPLACE "/" "." name ${prefix}/${name})
  set(${variable} ${name} PARENT_SCOPE)
endfunction()
