# SPDX-License-Identifier: BSL-1.0
# The component nccl: gradsync::nccl, which programs that include gradsync/backend/nccl.hpp link. It needs no nvcc. Means, and the
# Reducer, need the component cuda too.

include(${CMAKE_CURRENT_LIST_DIR}/../gradsyncTryProgram.cmake)
find_package(CUDAToolkit QUIET)
if(CUDAToolkit_FOUND AND TARGET CUDA::cudart)
  set(gradsync_modules ${CMAKE_MODULE_PATH})
  list(APPEND CMAKE_MODULE_PATH ${CMAKE_CURRENT_LIST_DIR}/..)
  find_package(NCCL 2.14 QUIET)
  set(CMAKE_MODULE_PATH ${gradsync_modules})
  if(NCCL_FOUND)
    gradsync_try_program(GRADSYNC_NCCL_WORKS
      "#include <cuda_runtime.h>\n#include <nccl.h>\nint main() { int n; return ncclGetVersion(&n) + cudaGetDeviceCount(&n); }\n"
      NCCL::nccl CUDA::cudart)
  endif()
endif()
if(NOT CUDAToolkit_FOUND OR NOT TARGET CUDA::cudart)
  set(gradsync_missing "the CUDA toolkit (set CUDAToolkit_ROOT)")
elseif(NOT NCCL_FOUND)
  set(gradsync_missing "NCCL 2.14 or later (set NCCL_ROOT)")
elseif(NOT GRADSYNC_NCCL_WORKS)
  set(gradsync_missing "a CUDA toolkit and an NCCL that compile and link together (set CUDAToolkit_ROOT and NCCL_ROOT)")
elseif(NOT TARGET gradsync::nccl)
  add_library(gradsync::nccl INTERFACE IMPORTED GLOBAL)
  target_link_libraries(gradsync::nccl INTERFACE gradsync::gradsync NCCL::nccl CUDA::cudart)
endif()
