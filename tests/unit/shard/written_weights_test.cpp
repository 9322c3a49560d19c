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

TEST_CASE("weights that were written after the object was made are refused by the first step, not undone") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors({30, 40}, DType::f32);
              ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, model, Sgd{});
              const Bytes before = model[1].value;
              const auto backward = [&] {
                  for (std::size_t i = 2; i-- > 0;) {
                      write(sharded.acquire_gradient(i), constant_bytes(DType::f32, model[i].count(), 0));
                      sharded.mark_ready(i);
                  }
                  sharded.finish();
              };
              write(model[1].value_view(), constant_bytes(DType::f32, 40, 5));
              backward();
              check_refused(
                  finding, [&] { sharded.step(); }, "were written after this ShardedOptimizer was made", model[1].name);
              sharded.adopt_values();
              sharded.step();
              finding.check(model[1].value == constant_bytes(DType::f32, 40, 5), "the weights are not those written");

              auto other = initial_tensors({30, 40}, DType::f32);  // weights that are perturbed for the backward only
              ShardedOptimizer<ThreadBackend, Sgd> restored(comm, other, Sgd{});
              write(other[1].value_view(), constant_bytes(DType::f32, 40, 5));
              for (std::size_t i = 2; i-- > 0;) {
                  write(restored.acquire_gradient(i), constant_bytes(DType::f32, other[i].count(), 0));
                  restored.mark_ready(i);
              }
              restored.finish();
              write(other[1].value_view(), before);
              restored.step();
              finding.check(restored.statistics().steps == 1, "no step");
          }) == "");
}

TEST_CASE("weights of 16 bits that were written after the object was made are refused by the first step, wherever they live") {
    enum class Home { apart, arena, buckets };
    const auto check = [](Home home, DType dtype, auto&& before_step) {
        return findings(2, [&](ThreadBackend comm, Finding& finding) {
            const std::vector<std::size_t> sizes = {64, 32, 64};
            auto model = initial_tensors(sizes, dtype);
            Bytes arena(160 * size_of(dtype));
            std::vector<ParameterView> views;
            std::size_t at = 0;
            for (Tensor& p : model) {
                views.push_back(parameter_view(p));
                if (home == Home::arena) {
                    views.back().value.data = arena.data() + at;
                    kernel::copy(p.value_view(), views.back().value);
                    at += p.value.size();
                }
            }
            views[0].requires_grad = false;
            ShardedOptimizer<ThreadBackend, Sgd> sharded(
                comm, views, Sgd{}, {.parameters = home == Home::buckets ? ParameterStorage::in_buckets : ParameterStorage::borrowed});
            // Each rank owns a part of each bucket, and both must refuse, whoever owns p1.
            write(sharded.parameter_value(1), constant_bytes(dtype, 32, 5));
            before_step(sharded, finding);
            for (std::size_t i = sizes.size(); i-- > 0;) {
                if (!sharded.parameters()[i].requires_grad) continue;
                write(sharded.acquire_gradient(i), constant_bytes(dtype, sizes[i], 0));
                sharded.mark_ready(i);
            }
            sharded.finish();
            check_refused(
                finding, [&] { sharded.step(); }, "were written after this ShardedOptimizer was made", "p1");
            sharded.adopt_values();
            sharded.step();
            finding.check(holds(sharded.parameter_value(1), constant_bytes(dtype, 32, 5)), "the weights are not those written");
        });
    };
    const std::size_t frozen[] = {0};
    const auto nothing = [](auto&, Finding&) {};
    const auto plans_anew = [&](auto& sharded, Finding& finding) {
        check_refused(
            finding, [&] { sharded.unfreeze(frozen); }, "adopt_values()", "p1");
        check_refused(
            finding, [&] { (void)sharded.rebuild_buckets(); }, "adopt_values()", "p1");
        const Bytes written = bytes_of(sharded.parameter_value(1));
        write(sharded.parameter_value(1), random_gradient(tensors({0, 32}, sharded.parameter_value(1).dtype)[1], 77, 0, 1));
        sharded.unfreeze(frozen);
        write(sharded.parameter_value(1), written);
    };
    for (const Home home : {Home::apart, Home::arena, Home::buckets}) {
        CAPTURE(static_cast<int>(home));
        CHECK(check(home, DType::bf16, nothing) == "");
        CHECK(check(home, DType::bf16, plans_anew) == "");
    }
    CHECK(check(Home::apart, DType::f32, plans_anew) == "");
}

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
