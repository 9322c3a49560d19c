# SPDX-License-Identifier: BSL-1.0
# The frameworks that tests and examples of interop/ use, where they are installed: Eigen3::Eigen, gradsync_torch.

find_package(Eigen3 3.4 QUIET NO_MODULE)
if(NOT Eigen3_FOUND)
  message(STATUS "gradsync: Eigen not found (libeigen3-dev): its adapter is not tested")
endif()

# libtorch's headers take 15 s a translation unit, and it does not pass sanitizers. Not among the packages that scripts/test
# installs: with what it needs (OpenCV, FFmpeg), it is several hundred megabytes.
if(NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize")
  find_package(Torch QUIET)
  if(TORCH_FOUND)
    include(cmake/gradsyncTryProgram.cmake)
    gradsync_try_program(GRADSYNC_TORCH_WORKS "#include <ATen/ATen.h>\nint main() { return at::zeros({1}).size(0) != 1; }\n" ${TORCH_LIBRARIES})
  endif()
  if(TORCH_FOUND AND GRADSYNC_TORCH_WORKS)
    add_library(gradsync_torch INTERFACE)
    target_link_libraries(gradsync_torch INTERFACE ${TORCH_LIBRARIES})
  else()
    message(STATUS "gradsync: libtorch not found, or not usable (libtorch-dev): its adapter is not tested")
  endif()
endif()
