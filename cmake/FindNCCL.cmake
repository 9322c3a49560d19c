# SPDX-License-Identifier: BSL-1.0
# NCCL::nccl: NVIDIA's library of collectives between devices.
#
# NCCL's own package file is taken where there is one (from 2.29.7 on). Otherwise NCCL is looked for in NCCL_ROOT or NCCL_HOME
# (variables of CMake or of the environment), with the CUDA toolkit, as Python's package nvidia-nccl installs it, and where the
# system keeps its libraries. NCCL_VERSION is the header's.

find_package(NCCL CONFIG QUIET)
if(NCCL_FOUND)
  include(FindPackageHandleStandardArgs)
  find_package_handle_standard_args(NCCL CONFIG_MODE)
  return()
endif()

set(_nccl_hints ${NCCL_ROOT} $ENV{NCCL_ROOT} ${NCCL_HOME} $ENV{NCCL_HOME})
set(_nccl_paths ${CUDAToolkit_LIBRARY_ROOT} ${CUDAToolkit_TARGET_DIR} ${CUDAToolkit_BIN_DIR}/.. /usr/local/cuda)
if(NOT NCCL_INCLUDE_DIR OR NOT NCCL_LIBRARY)
  find_program(_nccl_python NAMES python3 NO_CACHE)
  if(_nccl_python)
    execute_process(
      COMMAND ${_nccl_python} -c "import nvidia; print(*(p + d for p in nvidia.__path__ for d in ('/nccl', '/cu13', '/cu12')), sep=';')"
      OUTPUT_VARIABLE _nccl_package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    list(APPEND _nccl_paths ${_nccl_package})
  endif()
endif()
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${_nccl_hints} PATHS ${_nccl_paths} PATH_SUFFIXES include)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${_nccl_hints} PATHS ${_nccl_paths} PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib)
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)

if(NCCL_INCLUDE_DIR AND EXISTS ${NCCL_INCLUDE_DIR}/nccl.h)
  file(STRINGS ${NCCL_INCLUDE_DIR}/nccl.h _nccl_lines REGEX "#define NCCL_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+).*" "\\1.\\2.\\3" NCCL_VERSION "${_nccl_lines}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR VERSION_VAR NCCL_VERSION)

if(NCCL_FOUND AND NOT TARGET NCCL::nccl)
  add_library(NCCL::nccl UNKNOWN IMPORTED GLOBAL)
  set_target_properties(NCCL::nccl PROPERTIES IMPORTED_LOCATION ${NCCL_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${NCCL_INCLUDE_DIR})
endif()
