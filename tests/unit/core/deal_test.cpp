// SPDX-License-Identifier: BSL-1.0
// The example of docs/guides/training-step.md, and refusals. How a deal makes one order of sums is tested in
// engine/dealt_sums_test.cpp.
#include <gradsync/core/deal.hpp>

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace gs = gradsync;

TEST_CASE("Deal: the page shows what the code answers for 11 micro-batches on 3 ranks") {
    const auto repository = std::filesystem::absolute(__FILE__).parent_path() / "../../..";
    std::ifstream file(repository / "docs/guides/training-step.md");
    const std::string page(std::istreambuf_iterator<char>(file), {});
    REQUIRE(page.find("gs::Deal") != std::string::npos);
    for (const bool sharded : {false, true}) {
        const gs::Deal deal{11, 3, sharded};
        std::string row = sharded ? "| sharded: `gs::Deal{11, 3, true}` |" : "| whole: `gs::Deal{11, 3}` |";
        for (int rank = 0; rank < deal.ranks; ++rank) {
            for (std::size_t turn = 0; turn < deal.count(rank); ++turn)
                row += (turn == 0 ? " " : ", ") + std::to_string(deal.number(rank, turn));
            row += " |";
        }
        CAPTURE(row);
        CHECK(page.find("\n" + row + "\n") != std::string::npos);
    }
}

TEST_CASE("Deal: fewer ranks than one are refused") {
    for (const int ranks : {0, -1})
        for (const bool sharded : {false, true}) {
            const gs::Deal deal{.micro_batches = 8, .ranks = ranks, .sharded_gradients = sharded};
            const std::string message = "Deal: " + std::to_string(ranks) + " ranks; set `ranks` to the size of the communicator";
            CHECK_THROWS_WITH_AS(static_cast<void>(deal.count(0)), message.c_str(), gs::Error);
            CHECK_THROWS_WITH_AS(static_cast<void>(deal.number(0, 0)), message.c_str(), gs::Error);
            CHECK_THROWS_WITH_AS(static_cast<void>(deal.rounds()), message.c_str(), gs::Error);
            CHECK_THROWS_WITH_AS(static_cast<void>(deal.round(0)), message.c_str(), gs::Error);
        }
    static_assert(gs::Deal{8, 3}.count(0) == 3);
}
