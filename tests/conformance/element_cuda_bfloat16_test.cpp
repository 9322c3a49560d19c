// SPDX-License-Identifier: BSL-1.0
// ctest: TYPE __nv_bfloat16 LIBRARIES CUDA::toolkit NOT_WITH thread
#include <cuda_bf16.h>

#include "conformance/element.hpp"

TEST_CASE("CUDA's bfloat16 is an element") { gradsync_test::check_element<__nv_bfloat16, gradsync::BFloat16>(); }
