// SPDX-License-Identifier: BSL-1.0
#include <gradsync/engine/options.hpp>

#include <doctest/doctest.h>

#include <initializer_list>

using namespace gradsync;
using detail::contribution_of;

static_assert(contribution_of({}, 0, 7, true) == Contribution{1, 1});
static_assert(contribution_of({}, 0, 7, false) == Contribution{0, 0});
static_assert(contribution_of({.divisor = JoinDivisor::all_ranks}, 2, 7, false) == Contribution{0, 1});
static_assert(contribution_of({.averaging = Averaging::weighted_mean}, 1, 7, true) == Contribution{7, 7});
static_assert(contribution_of({.averaging = Averaging::weighted_mean}, 1, 7, false) == Contribution{0, 0});
static_assert(contribution_of({.averaging = Averaging::mean_over_count}, 1, 7, true) == Contribution{1, 7});
static_assert(contribution_of({.averaging = Averaging::mean_over_count}, 1, 7, false) == Contribution{0, 0});

TEST_CASE("contribution_of: the weights of a sum add up to 1 over the ranks, whoever has a batch") {
    for (const bool has_batch : {true, false})
        for (int rank = 0; rank < 3; ++rank)
            CHECK(contribution_of({.averaging = Averaging::sum}, rank, 7, has_batch) ==
                  Contribution{has_batch ? 1.0 : 0.0, rank == 0 ? 1.0 : 0.0});
}
