// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/bucket/per_parameter.hpp>

#include <doctest/doctest.h>

#include "support/plans.hpp"

using namespace gradsync_test;

TEST_CASE("PerParameter makes one bucket a parameter, launched in order") {
    const auto parameters = floats({5, 1, 0, 7});
    const std::vector<std::size_t> order{3, 1, 0, 2};
    CHECK(buckets(gradsync::PerParameter{}.plan(parameters, order)) == Buckets{{3}, {1}, {0}, {2}});
    CHECK(gradsync::PerParameter{}.describe() == "PerParameter");
}
