# SPDX-License-Identifier: BSL-1.0
# The component cuda: gradsync::cuda, the library's kernels. A target that links it compiles one more file, with nvcc. Enable the
# language CUDA first, and name the devices in CMAKE_CUDA_ARCHITECTURES.

find_package(CUDAToolkit QUIET)
if(NOT CMAKE_CUDA_COMPILER_LOADED OR NOT CUDAToolkit_FOUND OR NOT TARGET CUDA::cudart)
  set(gradsync_missing "the language CUDA (enable_language(CUDA), or project(... LANGUAGES CXX CUDA), before gradsync)")
elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12)
  set(gradsync_missing "nvcc 12 or later, which knows C++20 (this one is ${CMAKE_CUDA_COMPILER_VERSION})")
elseif(NOT TARGET gradsync::cuda)
  get_target_property(gradsync_include gradsync::gradsync INTERFACE_INCLUDE_DIRECTORIES)
  find_file(gradsync_passes gradsync/cuda/passes.cu PATHS ${CMAKE_CURRENT_LIST_DIR}/../../include ${gradsync_include} NO_DEFAULT_PATH NO_CACHE REQUIRED)
  add_library(gradsync::cuda INTERFACE IMPORTED GLOBAL)
  target_sources(gradsync::cuda INTERFACE ${gradsync_passes})
  target_link_libraries(gradsync::cuda INTERFACE gradsync::gradsync CUDA::cudart)
  # By hand: CMake before 3.26 knows no C++20 of nvcc's.
  target_compile_options(gradsync::cuda INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>)
endif()
