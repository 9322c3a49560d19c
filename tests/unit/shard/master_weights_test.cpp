// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include "sharded_training.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

BFloat16 numbers_to_bf16(const Bytes& from, std::size_t k) {
    BFloat16 result;
    std::memcpy(&result, from.data() + k * sizeof result, sizeof result);
    return result;
}

/// Sgd whose weights are rounded stochastically.
struct RoundingSgd : Sgd {
    std::uint64_t steps = 0;
    void begin_step() { ++steps; }
    void round(const RoundingSlice& s) const { round_stochastically(s, steps); }
};

}  // namespace

TEST_CASE("master weights of weights that were not written keep their lower bits: adopt_values() and broadcast_parameters()") {
    const auto check = [](auto stage, ParameterStorage storage, int size, auto optimizer) {
        return findings(size, [&](ThreadBackend comm, Finding& finding) {
            auto model = initial_tensors(awkward_sizes, DType::bf16);
            ShardedOptimizer sharded(comm, model, optimizer, stage, ShardingOptions{.parameters = storage}, SizeCappedBuckets(4096));
            for (int s = 0; s < 3; ++s) {
                sharded_backward(sharded, s);
                sharded.finish();
                sharded.step();
            }
            const auto masters = [&] {
                std::vector<std::vector<float>> all(model.size());
                sharded.for_each_shard([&](std::size_t i, std::size_t a, std::size_t first, BufferView view) {
                    if (a != 0) return;
                    for (std::size_t k = 0; k < view.count; ++k)
                        all[i].push_back(i == 5 && first + k == 7 ? 2 : view.template as<float>()[k]);
                });
                return all;
            };
            const auto before = masters();
            const auto weights_before = weights(sharded);
            const auto same = [&](const std::string& after) {
                for (std::size_t i = 0; i < model.size(); ++i)
                    finding.check(before[i] == masters()[i], "the master weights of p" + std::to_string(i) + " have changed: " + after);
                finding.check(first_difference(weights_before, weights(sharded)).empty(), "the weights have changed: " + after);
            };
            sharded.adopt_values();
            same("adopt_values()");
            sharded.broadcast_parameters();
            same("broadcast_parameters()");
            sharded.parameter_value(5).template as<BFloat16>()[7] = BFloat16(3.0f);
            sharded.adopt_values();
            sharded.for_each_shard([&](std::size_t i, std::size_t a, std::size_t first, BufferView view) {
                if (i == 5 && a == 0 && first <= 7 && 7 < first + view.count)
                    finding.check(view.template as<float>()[7 - first] == 3, "a weight that was written was not adopted");
            });
            sharded.parameter_value(5).template as<BFloat16>()[7] = numbers_to_bf16(weights_before[5], 7);
            same("a write to one weight");
        });
    };
    for (const int size : rank_counts()) {
        CAPTURE(size);
        for (const ParameterStorage storage : {ParameterStorage::borrowed, ParameterStorage::in_buckets}) {
            CHECK(check(Zero1{}, storage, size, Sgd{}) == "");
            CHECK(check(Zero2{}, storage, size, RoundingSgd{}) == "");
        }
    }
}
