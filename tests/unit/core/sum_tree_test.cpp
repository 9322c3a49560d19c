// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/math.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <optional>
#include <set>
#include <vector>

#include "support/random.hpp"
#include "support/sum_tree.hpp"

using namespace gradsync_test;
using gradsync::detail::are_halves;
using gradsync::detail::sums_after;

namespace {

using Halves = std::array<std::size_t, 3>;

/// First, middle and last leaf of all nodes over more than one leaf, from the definition.
std::set<Halves> nodes(std::size_t leaves) {
    struct Node {
        std::size_t first, last;
    };
    std::set<Halves> all;
    tree_sum(
        0, leaves,
        [](std::size_t i) {
            return std::optional(Node{i, i + 1});
        },
        [&](Node a, Node b) {
            all.insert({a.first, b.first, b.last});
            return std::optional(Node{a.first, b.last});
        });
    return all;
}

/// Adds up leaves one after the other, as engines do.
template <class T>
T sum_with_stack(const std::vector<T>& leaves) {
    std::vector<T> open;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
        open.push_back(leaves[i]);
        for (unsigned sums = sums_after(i, leaves.size()); sums != 0; --sums) {
            const T right = open.back();
            open.pop_back();
            open.back() += right;
        }
        CHECK(open.size() <= gradsync::detail::max_open_sums);
    }
    REQUIRE(open.size() == 1);
    return open.front();
}

}  // namespace

TEST_CASE("sum_tree finds the runs of leaves that are the halves of a node") {
    for (std::size_t leaves = 1; leaves <= 70; ++leaves) {
        const std::set<Halves> expected = nodes(leaves);
        CHECK(expected.size() == leaves - 1);
        // Both runs have to be nodes themselves: that is what the stack holds.
        std::set<std::array<std::size_t, 2>> runs;
        for (std::size_t i = 0; i < leaves; ++i) runs.insert({i, i + 1});
        for (const auto& [first, middle, last] : expected) runs.insert({first, last});
        for (const auto& [first, middle] : runs)
            for (const auto& [second, last] : runs)
                if (second == middle) CHECK(are_halves(first, middle, last, leaves) == expected.contains({first, middle, last}));
    }
}

TEST_CASE("sum_tree: leaves that are added up one after the other have the bits of the tree") {
    Random random(1);
    for (std::size_t leaves = 1; leaves <= 300; ++leaves) {
        std::vector<float> values;
        for (std::size_t i = 0; i < leaves; ++i) values.push_back(static_cast<float>(random() % 1000) / 7 - 70);
        const auto leaf = [&](std::size_t i) { return std::optional(values[i]); };
        CHECK(sum_with_stack(values) == *tree_sum(0, leaves, leaf, [](float a, float b) { return std::optional(a + b); }));
    }
}

TEST_CASE("sum_tree: the error grows with the logarithm of the number of leaves, that of a sum in one row with the number") {
    Random random(2);
    for (const std::size_t leaves : {2u, 16u, 100u, 512u, 1024u}) {
        double tree_error = 0, row_error = 0;
        const double unit = std::ldexp(1.0, -24);
        for (int round = 0; round < 50; ++round) {
            std::vector<float> values;
            double exact = 0, magnitudes = 0;
            for (std::size_t i = 0; i < leaves; ++i) {
                values.push_back(1 + static_cast<float>(random() % (1 << 23)) * 0x1p-23f);
                exact += static_cast<double>(values.back());
                magnitudes += static_cast<double>(values.back());
            }
            float row = 0;
            for (const float value : values) row += value;
            const double bound = std::ceil(std::log2(static_cast<double>(leaves))) * unit * magnitudes * 1.001;
            const double error = std::abs(static_cast<double>(sum_with_stack(values)) - exact);
            CHECK(error <= bound);
            tree_error += error;
            row_error += std::abs(static_cast<double>(row) - exact);
        }
        if (leaves >= 100) CHECK(tree_error < row_error / 2);
    }
}
