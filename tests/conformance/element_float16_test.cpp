// SPDX-License-Identifier: BSL-1.0
// ctest: TYPE _Float16
#include "conformance/element.hpp"

TEST_CASE("_Float16 is an element") { gradsync_test::check_element<_Float16, gradsync::Float16>(); }
