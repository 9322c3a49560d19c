# SPDX-License-Identifier: BSL-1.0
# The frameworks that tests and examples use, where they are installed: Eigen3::Eigen, gradsync_torch (the installed libtorch),
# gradsync_torch_wheel (PyPI's), and, for the nightly tests, dlib::dlib and gradsync_ensmallen.

find_package(Eigen3 3.4 QUIET NO_MODULE)
if(NOT Eigen3_FOUND)
  message(STATUS "gradsync: Eigen not found (libeigen3-dev): its adapter is not tested")
endif()

if(GRADSYNC_NIGHTLY_TESTS AND NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize")
  find_package(dlib QUIET)
  find_package(Armadillo QUIET)
  find_path(GRADSYNC_ENSMALLEN ensmallen.hpp HINTS "${PROJECT_SOURCE_DIR}/build/ensmallen/usr/include")
  mark_as_advanced(GRADSYNC_ENSMALLEN)
  if(ARMADILLO_FOUND AND GRADSYNC_ENSMALLEN)
    add_library(gradsync_ensmallen INTERFACE)
    target_include_directories(gradsync_ensmallen SYSTEM INTERFACE ${GRADSYNC_ENSMALLEN} ${ARMADILLO_INCLUDE_DIRS})
    target_link_libraries(gradsync_ensmallen INTERFACE ${ARMADILLO_LIBRARIES})
  endif()
endif()

# libtorch's headers take 15 s a translation unit, and it does not pass sanitizers. scripts/test --torch gets both versions.
if(NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize")
  include(cmake/gradsyncTryProgram.cmake)
  set(gradsync_torch_program "#include <ATen/ATen.h>\nint main() { return at::zeros({1}).size(0) != 1; }\n")
  if(GRADSYNC_NIGHTLY_TESTS)
    find_package(Torch QUIET)
  endif()
  if(TORCH_FOUND)
    gradsync_try_program(GRADSYNC_TORCH_WORKS "${gradsync_torch_program}" ${TORCH_LIBRARIES})
  endif()
  if(TORCH_FOUND AND GRADSYNC_TORCH_WORKS)
    add_library(gradsync_torch INTERFACE)
    target_link_libraries(gradsync_torch INTERFACE ${TORCH_LIBRARIES})
  else()
    message(STATUS "gradsync: libtorch not found, or not usable (libtorch-dev): its adapter is not tested with it")
  endif()

  set(GRADSYNC_TORCH_WHEEL "${PROJECT_SOURCE_DIR}/build/torch" CACHE PATH "A PyTorch of PyPI (its folder torch), for tests of the adapter")
  if(EXISTS "${GRADSYNC_TORCH_WHEEL}/lib/libtorch_cpu.so")
    add_library(gradsync_torch_wheel INTERFACE)
    # Not find_package(Torch), which asks for CUDA.
    target_include_directories(gradsync_torch_wheel SYSTEM INTERFACE "${GRADSYNC_TORCH_WHEEL}/include"
                                                                     "${GRADSYNC_TORCH_WHEEL}/include/torch/csrc/api/include")
    target_link_libraries(gradsync_torch_wheel INTERFACE "${GRADSYNC_TORCH_WHEEL}/lib/libtorch_cpu.so" "${GRADSYNC_TORCH_WHEEL}/lib/libc10.so"
                                                         "-Wl,--allow-shlib-undefined")
  else()
    message(STATUS "gradsync: no PyTorch of PyPI in ${GRADSYNC_TORCH_WHEEL} (scripts/test --torch gets it): its adapter is not tested with it")
  endif()
endif()
