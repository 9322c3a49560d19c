// SPDX-License-Identifier: BSL-1.0
// ctest: TYPE __bf16
#include "conformance/element.hpp"

TEST_CASE("__bf16 is an element") { gradsync_test::check_element<__bf16, gradsync::BFloat16>(); }
