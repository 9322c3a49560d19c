// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include "sharded_training.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

template <class Stage>
void check_all_policies(const Training& t) {
    for (const int size : rank_counts()) {
        CAPTURE(size);
        using enum ParameterStorage;
        CHECK(difference_of_stage<Stage, Flat, NoOverlap>(size, t, borrowed) == "");
        CHECK(difference_of_stage<Stage, SizeCappedBuckets, OverlapBackward>(size, t, in_buckets, SizeCappedBuckets(4096)) == "");
        CHECK(difference_of_stage<Stage, PerParameter, OverlapForward>(size, t, borrowed) == "");
        CHECK(difference_of_stage<Stage, SizeCappedBuckets, OverlapForward>(size, t, in_buckets, SizeCappedBuckets(8192)) == "");
    }
}

}  // namespace

TEST_CASE(
    "PyTorch parity: stage 1, with overlap and clipping by the global norm, trains to the bits of whole gradients and a whole optimizer") {
    check_all_policies<Zero1>({});
    check_all_policies<Zero1>({.reducer = {.gradients = GradientStorage::in_buckets}});
}

TEST_CASE(
    "PyTorch parity: stage 2, with overlap and clipping by the global norm, trains to the bits of whole gradients and a whole optimizer") {
    check_all_policies<Zero2>({});
}

TEST_CASE("f64 weights, and 16-bit weights with f32 master weights, train to the bits of a whole optimizer") {
    for (const DType dtype : {DType::f64, DType::bf16, DType::f16}) {
        const Training t{.dtype = dtype};
        CAPTURE(name_of(dtype));
        for (const int size : rank_counts(1, 3)) {
            using enum ParameterStorage;
            CHECK(difference_of_stage<Zero1, SizeCappedBuckets, OverlapBackward>(size, t, borrowed) == "");
            CHECK(difference_of_stage<Zero2, SizeCappedBuckets, OverlapBackward>(size, t, in_buckets, SizeCappedBuckets(2048)) == "");
        }
    }
}

TEST_CASE("stage 2 trains to the same bits with a progress thread, and with sums instead of means") {
    using enum ParameterStorage;
    for (const int size : rank_counts(1, 3)) {
        CHECK(difference_of_stage<Zero2>(size, {}, in_buckets, SizeCappedBuckets(3000), OverlapBackward(Progress::thread)) == "");
        CHECK(difference_of_stage<Zero2, SizeCappedBuckets, OverlapBackward>(size, {.reducer = {.averaging = Averaging::sum}}, borrowed) ==
              "");
    }
}

TEST_CASE("weights, gradients and state are aligned for their types") {
    const auto check = [](auto stage, auto buckets, int size) {
        return findings(size, [&](ThreadBackend comm, Finding& finding) {
            auto model = mixed_tensors();
            ShardedOptimizer<ThreadBackend, AlignedAdamW, decltype(stage), decltype(buckets)> sharded(
                comm, model, AlignedAdamW{}, {.reducer = {.gradients = with_library(stage)}, .parameters = ParameterStorage::in_buckets},
                buckets);
            mark_aligned(sharded, model.size(), finding);
            sharded.finish();
            sharded.step();
        });
    };
    for (const int size : rank_counts(1, 3)) {
        CHECK(check(Zero1{}, Flat{}, size) == "");
        CHECK(check(Zero1{}, SizeCappedBuckets(200), size) == "");
        CHECK(check(Zero2{}, PerParameter{}, size) == "");
        CHECK(check(Zero2{}, SizeCappedBuckets(200), size) == "");
    }
}

TEST_CASE("bf16 weights whose gradients travel in f32 train as whole ones do, up to rounding") {
    Training t{.dtype = DType::bf16};
    t.reducer.reduce_dtype = DType::f32;
    // The oracle gets its averages back in bf16, the shards keep them in f32: within what that rounds away.
    const auto expected = weights_of_whole(3, t);
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors(t.counts, t.dtype);
              ShardedOptimizer<ThreadBackend, AdamW> sharded(comm, model, AdamW{}, {.reducer = t.reducer});
              train_sharded(sharded, t);
              for (std::size_t i = 0; i < model.size(); ++i) {
                  const auto a = numbers(sharded.parameter_value(i)), b = numbers({expected[i].data(), model[i].count(), DType::bf16});
                  for (std::size_t k = 0; k < a.size(); ++k)
                      finding.check(std::abs(a[k] - b[k]) <= 0.02 + std::abs(b[k]) / 64,
                                    "p" + std::to_string(i) + " is " + std::to_string(a[k]) + ", not " + std::to_string(b[k]));
              }
          }) == "");
}

TEST_CASE("stage 2 takes gradients that several threads compute, in an order of their own") {
    const Training t{.counts = {300, 5, 2000, 900, 1, 64, 700, 3000, 20, 500}};
    const auto expected = weights_of_whole(3, t);
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors(t.counts, t.dtype);
              ShardedOptimizer<ThreadBackend, AdamW, Zero2, SizeCappedBuckets> sharded(comm, model, AdamW{}, {}, SizeCappedBuckets(3000));
              for (int s = 0; s < t.steps; ++s) {
                  const auto order = shuffled(model.size(), static_cast<std::uint32_t>(s * 3 + comm.rank()));
                  std::atomic<std::size_t> next{0};
                  std::vector<std::thread> threads;
                  for (int k = 0; k < 3; ++k)
                      threads.emplace_back([&] {
                          for (std::size_t at; (at = next++) < order.size();) {
                              const std::size_t i = order[at];
                              write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), s, i);
                              sharded.mark_ready(i);
                          }
                      });
                  for (std::thread& thread : threads) thread.join();
                  sharded.finish();
                  sharded.step(gradsync::clip_factor(sharded.gradient_norm(), t.max_norm));
              }
              finding.check(first_difference(expected, weights(sharded)).empty(),
                            first_difference(expected, weights(sharded)) + " differs");
          }) == "");
}

TEST_CASE("a parameter that no rank used is not stepped") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors({100, 200, 300}, DType::f32);
              const Bytes before = model[1].value;
              ShardedOptimizer<ThreadBackend, AdamW, Zero2> sharded(
                  comm, model, AdamW{}, {.reducer = {.unused = UnusedParameters::find_unused}}, SizeCappedBuckets(500));
              for (int s = 0; s < 3; ++s) {
                  for (std::size_t i = model.size(); i-- > 0;) {
                      if (i == 1 || (i == 2 && comm.rank() == 1)) continue;
                      write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), s, i);
                      sharded.mark_ready(i);
                  }
                  sharded.finish();
                  sharded.step();
              }
              finding.check(model[1].value == before, "p1 has changed");
              finding.check(model[2].value != initial_tensors({100, 200, 300}, DType::f32)[2].value, "p2 has not");
          }) == "");
}

TEST_CASE("stages 1 and 2 average by weights, and without ranks that have run out of data") {
    const auto check = [](auto stage, Averaging averaging) {
        using Stage = decltype(stage);
        return findings(3, [&](ThreadBackend comm, Finding& finding) {
            // Rank r has r + 1 batches of gradients of r, each of r + 1 samples; the mean is over the samples of those that have one.
            auto model = tensors({50, 3}, DType::f32);
            ShardedOptimizer<ThreadBackend, Sgd, Stage> sharded(comm, model, Sgd{1.0f}, {.reducer = {.averaging = averaging}});
            float expected = 0, momentum = 0;
            for (int s = 0; sharded.begin_step(s <= comm.rank()); ++s) {
                float sum = 0, count = 0;
                for (int r = s; r < 3; ++r) {
                    const float weight = averaging == Averaging::mean ? 1 : static_cast<float>(r + 1);
                    sum += weight * static_cast<float>(r);
                    count += weight;
                }
                momentum = 0.9f * momentum + sum / count;
                expected -= momentum;
                if (averaging != Averaging::mean) sharded.set_weight(comm.rank() + 1);
                if (s <= comm.rank())
                    for (std::size_t i = 2; i-- > 0;) {
                        write(sharded.acquire_gradient(i), constant_bytes(DType::f32, model[i].count(), comm.rank()));
                        sharded.mark_ready(i);
                    }
                sharded.finish();
                sharded.step();
            }
            for (const double w : numbers(sharded.parameter_value(0)))
                finding.check(std::abs(w - static_cast<double>(expected)) < 1e-5, "the weights are " + std::to_string(w));
        });
    };
    CHECK(check(Zero1{}, Averaging::mean) == "");
    CHECK(check(Zero2{}, Averaging::mean) == "");
    CHECK(check(Zero1{}, Averaging::weighted_mean) == "");
    CHECK(check(Zero2{}, Averaging::weighted_mean) == "");
}
