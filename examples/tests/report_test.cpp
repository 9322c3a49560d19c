// SPDX-License-Identifier: BSL-1.0
// What the results of a run are checked for.
#include "../report.hpp"

#include <doctest/doctest.h>

#include <stdexcept>
#include <vector>

TEST_CASE("a run whose ranks end with different parameters fails, and says which") {
    std::vector<gradsync_train::RankSummary> ranks(3);
    for (auto& rank : ranks) rank.digest = 0xabc;
    CHECK_NOTHROW(gradsync_train::expect_equal_digests(ranks));
    ranks[2].digest = 0xabd;
    CHECK_THROWS_WITH_AS(gradsync_train::expect_equal_digests(ranks),
                         "the ranks' parameters differ after the last step: digest 0000000000000abd on rank 2, 0000000000000abc on rank 0",
                         std::runtime_error);
}
