// SPDX-License-Identifier: BSL-1.0
// ctest: TYPE __half LIBRARIES CUDA::toolkit NOT_WITH thread
#include <cuda_fp16.h>

#include "conformance/element.hpp"

TEST_CASE("CUDA's half is an element") { gradsync_test::check_element<__half, gradsync::Float16>(); }
