# The component nccl: gradsync::nccl, what programs that use gradsync/backend/nccl.hpp link. No nvcc is needed for it; means, and the
# Reducer, need the component cuda too.

find_package(CUDAToolkit QUIET)
if(TARGET CUDA::cudart)
  set(gradsync_modules ${CMAKE_MODULE_PATH})
  list(APPEND CMAKE_MODULE_PATH ${CMAKE_CURRENT_LIST_DIR}/..)
  find_package(NCCL 2.14 QUIET)
  set(CMAKE_MODULE_PATH ${gradsync_modules})
endif()
if(NOT TARGET CUDA::cudart)
  set(gradsync_missing "the CUDA toolkit (set CUDAToolkit_ROOT)")
elseif(NOT TARGET NCCL::nccl)
  set(gradsync_missing "NCCL 2.14 or later (set NCCL_ROOT)")
elseif(NOT TARGET gradsync::nccl)
  add_library(gradsync::nccl INTERFACE IMPORTED GLOBAL)
  target_link_libraries(gradsync::nccl INTERFACE gradsync::gradsync NCCL::nccl CUDA::cudart)
endif()
