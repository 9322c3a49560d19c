// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "sharded_training.hpp"

using namespace gradsync;
using namespace gradsync_test;

TEST_CASE("step(), marks and finish() in the wrong order are refused, and the error says what to call first") {
    const auto says = [](auto&& f) { return outcomes(1, f)[0].text; };
    const auto model_of = [] { return initial_tensors({10, 20}, DType::f32); };
    CHECK(says([&](ThreadBackend comm) {
              auto model = model_of();
              ShardedOptimizer<ThreadBackend, Sgd>(comm, model, Sgd{}).step();
          }) == "step on rank 0: there are no averaged gradients; call finish() first");
    CHECK(says([&](ThreadBackend comm) {
              auto model = model_of();
              ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, model, Sgd{});
              for (int k = 0; k < 2; ++k) {
                  for (std::size_t i = 0; i < 2; ++i) sharded.mark_ready(i);
                  sharded.finish();
              }
          }) ==
          "mark_ready on rank 0: gradients are averaged already; call step() first, or put micro-batches before the last under no_sync()");
    CHECK(says([&](ThreadBackend comm) {
              auto model = model_of();
              ShardedOptimizer<ThreadBackend, Sgd, Zero2> sharded(comm, model, Sgd{});
              sharded.mark_ready(1);
          }).find("call acquire_gradient(i) before its gradient is written") != std::string::npos);
    CHECK(says([&](ThreadBackend comm) {
              auto model = model_of();
              ShardedOptimizer<ThreadBackend, Sgd, Zero1, Flat, OverlapForward> sharded(comm, model, Sgd{});
              for (int k = 0; k < 2; ++k) {
                  for (std::size_t i = 0; i < 2; ++i) sharded.mark_ready(i);
                  sharded.finish();
                  sharded.step();
              }
          }) ==
          "finish on rank 0: weights of the last step were not waited for; call wait_parameter(i) before parameter i is used, or flush()");
    CHECK(says([&](ThreadBackend comm) {
              auto model = model_of();
              ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, model, Sgd{});
              for (std::size_t i = 0; i < 2; ++i) sharded.mark_ready(i);
              sharded.finish();
              (void)sharded.rebuild_buckets();
          }) == "rebuild_buckets on rank 0: gradients of this step are averaged already; call step() first");
}

TEST_CASE("stage 1: calls at the wrong time, and with wrong arguments, are refused, and the training goes on to the same bits") {
    const Training t;
    for (const int size : rank_counts(1, 3)) {
        const auto expected = weights_of_whole(size, t);
        CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                  auto model = initial_tensors(t.counts, t.dtype);
                  ShardedOptimizer<ThreadBackend, AdamW> sharded(comm, model, AdamW{});
                  const std::string averaged =
                      "gradients are averaged already; call step() first, or put micro-batches before the last under no_sync()";
                  for (int s = 0; s < t.steps; ++s) {
                      for (const int root : {99, comm.size(), -1})
                          check_refused(
                              finding, [&] { sharded.broadcast_parameters(root); }, "there is no rank " + std::to_string(root));
                      sharded_backward(sharded, s);
                      sharded.finish();
                      check_refused(
                          finding, [&] { sharded.finish(); }, averaged);
                      const double norm = sharded.gradient_norm();
                      check_refused(
                          finding, [&] { sharded.finish(); }, averaged);
                      check_refused(
                          finding, [&] { sharded.step(std::nan("")); }, "a gradient scale must be finite, not nan");
                      sharded.step(gradsync::clip_factor(norm, t.max_norm));
                  }
                  sharded.broadcast_parameters();
                  finding.check(first_difference(expected, weights(sharded)).empty(),
                                first_difference(expected, weights(sharded)) + " differs");
              }) == "");
    }
}

TEST_CASE("what the engine refuses leaves a sharded optimizer usable: finish() of an early micro-batch, and a late mark") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors({30, 40}, DType::f32);
              ShardedOptimizer<ThreadBackend, Sgd> sharded(
                  comm, model, Sgd{}, ShardingOptions{.reducer = {.accumulation = Accumulation::in_buckets, .micro_batches = 4}});
              const auto backward = [&] {
                  for (std::size_t i = 2; i-- > 0;) {
                      write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), 0, i, false);
                      sharded.mark_ready(i);
                  }
              };
              check_refused(
                  finding, [&] { sharded.finish(); }, "this is micro-batch 1 of the step, and not the last of 2");
              {
                  const auto guard = sharded.no_sync();
                  backward();
              }
              backward();
              sharded.finish();
              check_refused(
                  finding, [&] { sharded.mark_ready(1); }, "gradients are averaged already; call step() first");
              sharded.step();
              finding.check(sharded.statistics().steps == 1, "no step");
          }) == "");
}

TEST_CASE("marks and no_sync() between finish() and step() are refused, or wait for another finish(): nothing half-reduced is stepped") {
    const auto check = [](auto stage, int size, const ShardingOptions& options, bool parts) {
        Training t{.max_norm = 0};
        const bool counts = options.reducer.micro_batches != 0;
        const auto expected = weights_of_whole(size, t);
        return findings(size, [&](ThreadBackend comm, Finding& finding) {
            auto model = initial_tensors(t.counts, t.dtype);
            const auto train = [&](auto&& sharded) {
                const std::size_t first = model.size() - 1;
                for (int s = 0; s < t.steps; ++s) {
                    sharded_backward(sharded, s);
                    sharded.finish();
                    const Outcome guarded = outcome_of([&] { const auto guard = sharded.no_sync(); });
                    finding.check(guarded.is(Errc::invalid_argument), "no_sync() is not refused: " + guarded.text);
                    if (!stage.shards_gradients || counts) {
                        // The trainer has not written gradients, so the step has those of the backward.
                        const Outcome marked = outcome_of([&] { sharded.mark_ready(first); });
                        finding.check(marked.is(Errc::invalid_argument) && marked.says("averaged") && marked.says("call step() first"),
                                      "a mark is not refused: " + marked.text);
                    } else if (comm.rank() != 1) {  // a second micro-batch that is the first one once more: the same mean
                        const auto mark = [&](std::size_t i) {
                            if constexpr (requires { sharded.gather(0); }) {
                                const auto use = sharded.gather(sharded.unit_of(i));
                                write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), s, i);
                            } else {
                                write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), s, i);
                            }
                            sharded.mark_ready(i);
                        };
                        mark(first);
                        check_refused(
                            finding, [&] { sharded.step(); },
                            "some gradients of this step are marked; mark the rest, and call finish() first");
                        check_refused(
                            finding, [&] { (void)sharded.gradient_norm(); }, "are marked; mark the rest, and call finish() first");
                        for (std::size_t i = first; i-- > 0;) mark(i);
                        sharded.finish();
                    } else {
                        sharded_backward(sharded, s);
                        sharded.finish();
                    }
                    sharded.step();
                }
                finding.check(first_difference(expected, weights(sharded)).empty(),
                              first_difference(expected, weights(sharded)) + " differs");
            };
            if (parts) train(ShardedParameters<ThreadBackend, AdamW>(comm, model, AdamW{}, awkward_units));
            else train(ShardedOptimizer<ThreadBackend, AdamW, decltype(stage)>(comm, model, AdamW{}, options));
        });
    };
    for (const int size : rank_counts()) {
        CAPTURE(size);
        CHECK(check(Zero1{}, size, {}, false) == "");
        CHECK(check(Zero1{}, size, {.reducer = {.gradients = GradientStorage::in_buckets}}, false) == "");
        CHECK(check(StepInside{}, size, {}, false) == "");
        CHECK(check(Zero2{}, size, {}, false) == "");
        CHECK(check(Zero2{}, size, {}, true) == "");
        const ReducerOptions counted{.accumulation = Accumulation::in_buckets, .micro_batches = static_cast<std::size_t>(size)};
        CHECK(check(Zero2{}, size, {.reducer = counted}, false) == "");
    }
}

TEST_CASE("with OverlapForward finish() before weights were waited for is refused, and works after flush()") {
    const Training t;
    const auto expected = weights_of_whole(2, t);
    const auto check = [&](auto stage) {
        return findings(2, [&](ThreadBackend comm, Finding& finding) {
            auto model = initial_tensors(t.counts, t.dtype);
            ShardedOptimizer<ThreadBackend, AdamW, decltype(stage), SizeCappedBuckets, OverlapForward> sharded(comm, model, AdamW{}, {},
                                                                                                               SizeCappedBuckets(4096));
            for (int s = 0; s < t.steps; ++s) {
                sharded_backward(sharded, s);
                sharded.finish();
                sharded.step(gradsync::clip_factor(sharded.gradient_norm(), t.max_norm));
                check_refused(
                    finding, [&] { sharded.finish(); }, "weights of the last step were not waited for");
                if (s % 2 == 0) sharded.flush();  // else the next forward waits for them
            }
            sharded.flush();
            finding.check(first_difference(expected, weights(sharded)).empty(), first_difference(expected, weights(sharded)) + " differs");
        });
    };
    CHECK(check(Zero1{}) == "");
    CHECK(check(Zero2{}) == "");
}

TEST_CASE("NonFinite::skip is refused, and what the message says instead skips the step on all ranks") {
    constexpr std::size_t count = 2000;
    const auto check = [&](auto stage, int size) {
        return findings(size, [&](ThreadBackend comm, Finding& finding) {
            std::vector<float> w(count, 1), gradient(count);
            const std::vector model = {parameter("w", w, gradient)};
            using Sharded = ShardedOptimizer<ThreadBackend, Sgd, decltype(stage)>;
            finding.check(outcome_of([&] {
                              Sharded(comm, model, Sgd{}, {.reducer = {.non_finite = NonFinite::skip}});
                          }).says("leave out steps whose gradient_norm() is not finite (with shards: discard())"),
                          "not refused");
            Sharded sharded(comm, model, Sgd{});
            for (int s = 0; s < 3; ++s) {
                const std::span<float> g = sharded.acquire_gradient(0).template as<float>();
                std::fill(g.begin(), g.end(), 1.0f);
                if (s == 1 && comm.rank() == size - 1) g[7] = std::numeric_limits<float>::infinity();
                sharded.mark_ready(0);
                sharded.finish();
                const bool finite = std::isfinite(sharded.gradient_norm());
                finding.check(finite == (s != 1), "the norm");
                const float before = w[9];
                finite ? sharded.step() : sharded.discard();
                finding.check((w[9] < before) == finite && std::isfinite(w[7]), "the weights");
            }
        });
    };
    for (const int size : rank_counts(1, 3)) {
        CHECK(check(Zero1{}, size) == "");
        CHECK(check(Zero2{}, size) == "");
        CHECK(check(StepInside{}, size) == "");
    }
}
