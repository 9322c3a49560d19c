// SPDX-License-Identifier: BSL-1.0
// ctest: TYPE at::BFloat16 LIBRARIES gradsync_torch
#include <c10/util/BFloat16.h>

#include "conformance/element.hpp"

TEST_CASE("libtorch's bfloat16 is an element") { gradsync_test::check_element<at::BFloat16, gradsync::BFloat16>(); }
