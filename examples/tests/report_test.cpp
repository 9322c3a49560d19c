// SPDX-License-Identifier: BSL-1.0
// What the results of a run are checked for.
#include "../report.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

TEST_CASE("the chart of losses has eight rows, from the first step to the last") {
    const double inf = std::numeric_limits<double>::infinity();
    CHECK(gradsync_train::loss_chart(std::vector<double>(7, 1.0), 0).empty());
    const std::string chart = gradsync_train::loss_chart(std::vector<double>{4, 4, 3, 3, 2, 2, 1, inf}, 12);
    CHECK(chart.find("step 13   4.000  " + std::string(40, '#') + "\n") != std::string::npos);
    CHECK(chart.find("step 19   1.000  " + std::string(10, '#') + "\n") != std::string::npos);
    CHECK(chart.find("step 20     inf  \n") != std::string::npos);
    CHECK(std::count(chart.begin(), chart.end(), '\n') == 10);
}

TEST_CASE("a run whose ranks end with different parameters fails, and says which") {
    std::vector<gradsync_train::RankSummary> ranks(3);
    for (auto& rank : ranks) rank.digest = 0xabc;
    CHECK_NOTHROW(gradsync_train::expect_equal_digests(ranks));
    ranks[2].digest = 0xabd;
    CHECK_THROWS_WITH_AS(gradsync_train::expect_equal_digests(ranks),
                         "the ranks' parameters differ after the last step: digest 0000000000000abd on rank 2, 0000000000000abc on rank 0",
                         std::runtime_error);
}
