// SPDX-License-Identifier: BSL-1.0
// ctest: TYPE Eigen::bfloat16 LIBRARIES Eigen3::Eigen NOT_WITH thread
#include <Eigen/Core>

#include "conformance/element.hpp"

TEST_CASE("Eigen's bfloat16 is an element") { gradsync_test::check_element<Eigen::bfloat16, gradsync::BFloat16>(); }
