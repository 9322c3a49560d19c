// SPDX-License-Identifier: BSL-1.0
// Sums over ranks that are several leaves, or none. The suite of backends covers the rest.
#include <gradsync/collective/combine.hpp>

#include <doctest/doctest.h>

#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

#include "support/random.hpp"
#include "support/sum_tree.hpp"

namespace gs = gradsync;
using namespace gradsync_test;
using gs::collective::Call;
using gs::collective::Combiner;

namespace {

float combined(Combiner& combiner, const std::vector<Call>& calls, const std::vector<float>& values) {
    std::vector<const void*> inputs;
    for (const float& value : values) inputs.push_back(&value);
    float result = -1;
    void* out = &result;
    combiner.run(calls, inputs, {&out, 1}, 1);
    return result;
}

std::optional<float> add(float a, float b) { return a + b; }

}  // namespace

TEST_CASE("Combiner: ranks without a contribution have a place in the tree, and change nothing else") {
    Random random(1);
    for (int round = 0; round < 2000; ++round) {
        const std::size_t ranks = 1 + random() % 20;
        std::vector<Call> calls(ranks, {.op = gs::ReduceOp::mean});
        std::vector<float> values;
        double weight = 0;
        for (Call& call : calls) {
            const bool present = random() % 4 != 0;
            call.contribution = {present ? 1.0 : 0.0, present ? 2.0 : 0.0};
            weight += call.contribution.weight;
            values.push_back(static_cast<float>(random() % 1000) / 7);
        }
        const auto leaf = [&](std::size_t r) { return calls[r].contribution.scale == 0 ? std::nullopt : std::optional(values[r]); };
        const float sum = tree_sum(0, ranks, leaf, add).value_or(0);
        Combiner combiner(ranks);
        CHECK(combined(combiner, calls, values) == (weight == 0 ? 0 : sum * static_cast<float>(1 / weight)));
    }
}

TEST_CASE("Combiner: the sum of ranks that have added up several leaves each is that of all leaves") {
    Random random(2);
    for (int round = 0; round < 2000; ++round) {
        // Cuts the leaves where nodes end: each rank has one node.
        const std::size_t leaves = 1 + random() % 60;
        std::vector<float> values(leaves);
        for (float& value : values) value = static_cast<float>(random() % 1000) / 7;
        const auto leaf = [&](std::size_t i) { return std::optional(values[i]); };
        gs::List<std::size_t> counts;
        std::vector<float> sums;
        const auto cut = [&](auto&& self, std::size_t first, std::size_t last) -> void {
            std::size_t half = 1;
            while (2 * half < last - first) half *= 2;
            if (last - first == 1 || random() % 3 == 0) {
                counts.push_back(last - first);
                sums.push_back(*tree_sum(first, last, leaf, add));
            } else {
                self(self, first, first + half);
                self(self, first + half, last);
            }
        };
        // A node's own tree is that of its leaves counted from 0, because its first leaf is a multiple of its size.
        cut(cut, 0, leaves);
        Combiner combiner(counts.size());
        combiner.set_leaves(counts);
        CHECK(combined(combiner, std::vector<Call>(counts.size()), sums) == *tree_sum(0, leaves, leaf, add));
    }
}
