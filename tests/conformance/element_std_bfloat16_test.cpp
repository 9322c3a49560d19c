// SPDX-License-Identifier: BSL-1.0
// ctest: TYPE std::bfloat16_t COMPILE_OPTIONS -std=c++23
#include <stdfloat>

#include "conformance/element.hpp"

TEST_CASE("std::bfloat16_t is an element") { gradsync_test::check_element<std::bfloat16_t, gradsync::BFloat16>(); }
