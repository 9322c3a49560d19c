// SPDX-License-Identifier: BSL-1.0
// ctest: TYPE Eigen::half LIBRARIES Eigen3::Eigen NOT_WITH thread
#include <Eigen/Core>

#include "conformance/element.hpp"

TEST_CASE("Eigen's half is an element") { gradsync_test::check_element<Eigen::half, gradsync::Float16>(); }
