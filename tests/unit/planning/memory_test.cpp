// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/planning/memory.hpp>

#include <doctest/doctest.h>

#include <cstdint>

#include "support/ranks.hpp"

using namespace gradsync::plan;

TEST_CASE("ZeRO in mixed precision needs 16 P, 4 P + 12 P / n, 2 P + 14 P / n and 16 P / n bytes") {
    const std::uint64_t p = 7'500'000'000;
    for (const std::uint64_t n : {1ull, 2ull, 64ull, 1000ull}) {
        const auto total = [&](ZeroStage stage) { return state_memory(p, mixed_precision_adam, stage, n).total(); };
        REQUIRE(p % n == 0);
        CHECK(total(ZeroStage::none) == 16 * p);
        CHECK(total(ZeroStage::optimizer) == 4 * p + 12 * p / n);
        CHECK(total(ZeroStage::gradients) == 2 * p + 14 * p / n);
        CHECK(total(ZeroStage::parameters) == 16 * p / n);
    }
    // Shards are rounded up, so that all together hold everything.
    CHECK(state_memory(10, mixed_precision_adam, ZeroStage::parameters, 3).total() == 4 * 16);
}

TEST_CASE("invalid sizes, and those that 64 bits do not hold, are refused") {
    using gradsync_test::outcome_of;
    CHECK(outcome_of([&] { state_memory(std::uint64_t{1} << 61, single_precision_adam, ZeroStage::none, 1).total(); }).says("64 bits"));
    CHECK(outcome_of([&] { state_memory(5, single_precision_adam, ZeroStage::none, 0); }).says("ranks is 0"));
}
