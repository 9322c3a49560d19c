// SPDX-License-Identifier: BSL-1.0
// ctest: TYPE __nv_fp8_e5m2 LIBRARIES CUDA::toolkit NOT_WITH thread
#include <cuda_fp8.h>

#include "conformance/element.hpp"

TEST_CASE("CUDA's E5M2 is an element") { gradsync_test::check_element<__nv_fp8_e5m2, gradsync::Float8E5M2>(); }
