// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/bucket/units.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include <gradsync/core/error.hpp>

#include "support/plans.hpp"
#include "support/ranks.hpp"

using namespace gradsync_test;
using gradsync::DType;
using gradsync::Errc;
using gradsync::ParameterInfo;
using gradsync::Units;

TEST_CASE("Units makes a bucket for each unit, launched as they become complete, wherever its parameters stand") {
    const Units units({0, 1, 0, 2, 1});
    CHECK(buckets(units.plan(floats({5, 1, 0, 7, 2}), reversed(5))) == Buckets{{3}, {4, 1}, {2, 0}});
    CHECK(units.count() == 3);
    CHECK(units.size() == 5);
    CHECK(units.unit_of(3) == 2);
    CHECK(units.describe() == "Units{3}");
}

TEST_CASE("Units makes a bucket for each dtype of gradients and of values, and each memory space, of a unit") {
    const ParameterInfo plain{.count = 4}, narrow{.count = 4, .dtype = DType::bf16},
        far{.count = 4, .space = gradsync::MemorySpace::device}, narrow_values{.count = 4, .value_dtype = DType::bf16};
    CHECK(buckets(Units({0, 0, 0, 0, 0, 0, 0, 0})
                      .plan(std::vector{plain, narrow, far, narrow_values, narrow_values, far, narrow, plain}, in_order(8))) ==
          Buckets{{3, 4}, {2, 5}, {1, 6}, {0, 7}});
}

TEST_CASE("Units: a unit may have no parameter, and one whose parameters are all frozen has no bucket") {
    CHECK(Units({4, 2}).count() == 5);
    CHECK(buckets(Units({4, 2, 1}).plan(floats({1, 2, 3}), std::vector<std::size_t>{2, 0})) == Buckets{{2}, {0}});
    CHECK(Units({}).count() == 0);
    CHECK(Units({}).plan({}, {}).empty());
}

TEST_CASE("Units: a negative number that was converted is refused, and shown as it was given") {
    for (const int given : {-1, -2, std::numeric_limits<int>::min()}) {
        CAPTURE(given);
        for (const std::size_t place : {0u, 2u}) {
            std::vector<std::size_t> unit_of(3);
            unit_of[place] = static_cast<std::size_t>(given);
            const Outcome outcome = outcome_of([&] { Units{unit_of}; });
            INFO(outcome.text);
            CHECK(outcome.is(Errc::invalid_argument));
            CHECK(outcome.says("unit " + std::to_string(given) + ";"));
            CHECK(outcome.says("number units from 0"));
        }
    }
}

TEST_CASE("Units must name a unit for every parameter") {
    const Outcome outcome = outcome_of([] { (void)Units({0, 1}).plan(floats({1, 2, 3}), in_order(3)); });
    CHECK(outcome.is(Errc::invalid_argument));
    CHECK(outcome.says("there are 3 parameters, but units for 2"));
}
