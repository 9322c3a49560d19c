// SPDX-License-Identifier: BSL-1.0
// ctest: TYPE at::Half LIBRARIES gradsync_torch
#include <c10/util/Half.h>

#include "conformance/element.hpp"

TEST_CASE("libtorch's half is an element") { gradsync_test::check_element<at::Half, gradsync::Float16>(); }
