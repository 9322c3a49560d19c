// SPDX-License-Identifier: BSL-1.0
#include <gradsync/engine/dealt_sums.hpp>

#include <doctest/doctest.h>

#include <bit>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/sum_tree.hpp"

using namespace gradsync_test;
using gradsync::Deal;
using gradsync::detail::end_of_sum;

namespace {

using Formula = std::optional<std::string>;

Formula add(const std::string& a, const std::string& b) { return "(" + a + "+" + b + ")"; }
/// The sum of the micro-batches [first, last) as their own tree has it.
Formula own_tree(std::size_t first, std::size_t last) {
    return tree_sum(
        first, last, [](std::size_t i) { return Formula(std::to_string(i)); }, add);
}

/// The sum of a step as it is made: ranks add up their blocks, the tree over the ranks these sums, and a stack the sums of the ranks.
std::string sum_of(const Deal& deal) {
    std::vector<std::pair<std::size_t, std::string>> stack;
    for (std::size_t number = 0; number < deal.rounds(); ++number) {
        const Deal::Round round = deal.round(number);
        for (int first = 0, last = 0; first < round.ranks; first = last) {
            last = end_of_sum(round, first);
            const Formula sum = tree_sum(
                0, static_cast<std::size_t>(deal.ranks),
                [&](std::size_t r) {
                    if (static_cast<int>(r) < first || static_cast<int>(r) >= last) return Formula();
                    const std::size_t begin = round.first + r * round.block;
                    return own_tree(begin, begin + round.block);
                },
                add);
            std::size_t leaves = static_cast<std::size_t>(last - first) * round.block;
            REQUIRE(std::has_single_bit(leaves));
            stack.emplace_back(leaves, sum.value());
            while (stack.size() > 1 && stack[stack.size() - 2].first == stack.back().first) {
                const auto right = stack.back();
                stack.pop_back();
                stack.back() = {2 * right.first, add(stack.back().second, right.second).value()};
            }
        }
    }
    while (stack.size() > 1) {
        const auto right = stack.back();
        stack.pop_back();
        stack.back().second = add(stack.back().second, right.second).value();
    }
    return stack.front().second;
}

}  // namespace

TEST_CASE("Deal: every micro-batch goes to one rank, and no rank has two more than another") {
    for (const bool sharded : {false, true})
        for (int ranks = 1; ranks <= 9; ++ranks)
            for (std::size_t all = static_cast<std::size_t>(ranks); all <= 70; ++all) {
                const Deal deal{all, ranks, sharded};
                std::vector<int> dealt(all);
                for (int r = 0; r < ranks; ++r) {
                    CHECK(deal.count(0) - deal.count(r) <= 1);
                    for (std::size_t turn = 0; turn < deal.count(r); ++turn) {
                        REQUIRE(deal.number(r, turn) < all);
                        ++dealt[deal.number(r, turn)];
                        if (sharded) CHECK(deal.number(r, turn) == turn * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(r));
                    }
                }
                CAPTURE(all);
                CAPTURE(ranks);
                CHECK(dealt == std::vector<int>(all, 1));
            }
}

TEST_CASE("Deal: a power of two for each rank is one round of consecutive micro-batches") {
    constexpr Deal deal{24, 3};
    static_assert(deal.rounds() == 1 && deal.count(2) == 8 && deal.number(1, 0) == 8 && deal.number(2, 7) == 23);
    constexpr Deal uneven{8, 3};
    static_assert(uneven.rounds() == 2 && uneven.count(0) == 3 && uneven.count(2) == 2 && uneven.number(0, 2) == 6);
}

TEST_CASE("Deal: whatever the number of ranks, the sum is that of the tree over the micro-batches") {
    for (const bool sharded : {false, true})
        for (int ranks = 1; ranks <= 9; ++ranks)
            for (std::size_t all = static_cast<std::size_t>(ranks); all <= 70; ++all) {
                const Deal deal{all, ranks, sharded};
                CAPTURE(all);
                CAPTURE(ranks);
                CAPTURE(sharded);
                // Otherwise the sum over all ranks is made at once, as it is the whole tree.
                if (deal.rounds() != 1 || deal.round(0).ranks != ranks) CHECK(sum_of(deal) == own_tree(0, all).value());
            }
}
