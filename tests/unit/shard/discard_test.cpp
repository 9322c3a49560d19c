// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "sharded_training.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// A training in which some backwards are not finite, as with a loss scale that is too large, and are discarded, once or more. With
/// `micro_batches` several come before each discard().
template <class Sharded>
void train_with_discarded(Sharded& sharded, const Training& t, int micro_batches, Finding& finding) {
    const auto nothing_averaged = [&] {
        for (const auto& outcome : {outcome_of([&] { sharded.step(); }), outcome_of([&] { sharded.gradient_norm(); })})
            finding.check(outcome.is(Errc::invalid_argument) && outcome.says("there are no averaged gradients"), outcome.text);
    };
    for (int s = 0; s < t.steps; ++s) {
        for (int k = 0; k < s; ++k) {
            for (int m = 0; m < micro_batches; ++m) {
                sharded_backward(sharded, 1000 + 10 * s + m, m + 1 == micro_batches);
                sharded.finish();
            }
            finding.check(!std::isfinite(sharded.gradient_norm()), "the norm of what is discarded is finite");
            sharded.discard();
            nothing_averaged();
        }
        sharded_backward(sharded, t.batch(s, 0));
        sharded.finish();
        sharded.step(gradsync::clip_factor(sharded.gradient_norm(), t.max_norm));
        sharded.discard();  // nothing is left to forget
        nothing_averaged();
    }
    finding.check(sharded.statistics().steps == static_cast<std::size_t>(t.steps), "discarded steps count as steps");
}

template <class Stage, class Overlap>
std::string difference_with_discarded(Stage, int size, const Training& t, ParameterStorage parameters, const AnyBuckets& buckets,
                                      const Overlap& overlap, int micro_batches = 1) {
    const std::vector<Bytes> expected = weights_of_whole(size, t, AdamW{{0.01, 0.02}});
    return findings(size, [&](ThreadBackend comm, Finding& finding) {
        auto model = initial_tensors(t.counts, t.dtype);
        ShardedOptimizer<ThreadBackend, AdamW, Stage, AnyBuckets, Overlap> sharded(
            comm, model, AdamW{{0.01, 0.02}}, {.reducer = t.reducer, .parameters = parameters}, buckets, overlap);
        train_with_discarded(sharded, t, micro_batches, finding);
        sharded.flush();
        finding.check(first_difference(expected, weights(sharded)).empty(), first_difference(expected, weights(sharded)) + " differs");
    });
}

}  // namespace

TEST_CASE("a backward that is discarded leaves no trace: stages 1 and 2") {
    using enum ParameterStorage;
    const AnyOverlap none = NoOverlap{}, backward = OverlapBackward{};
    const OverlapForward forward;
    const Training apart, stored{.reducer = {.gradients = GradientStorage::in_buckets}}, narrow{.dtype = DType::bf16};
    const SizeCappedBuckets small(4096);
    for (const int size : rank_counts(1, 3)) {
        CAPTURE(size);
        CHECK(difference_with_discarded(Zero1{}, size, apart, borrowed, Flat{}, none) == "");
        CHECK(difference_with_discarded(Zero1{}, size, stored, in_buckets, PerParameter{}, backward) == "");
        CHECK(difference_with_discarded(Zero1{}, size, apart, borrowed, small, forward) == "");
        for (const int micro_batches : {1, 2}) {
            CHECK(difference_with_discarded(Zero2{}, size, apart, borrowed, Flat{}, none, micro_batches) == "");
            CHECK(difference_with_discarded(Zero2{}, size, narrow, in_buckets, small, backward, micro_batches) == "");
            CHECK(difference_with_discarded(Zero2{}, size, apart, borrowed, PerParameter{}, forward, micro_batches) == "");
        }
    }
}

TEST_CASE("a backward that is discarded leaves no trace: sharded parameters") {
    const Training t;
    for (const int size : rank_counts(1, 3)) {
        const std::vector<Bytes> expected = weights_of_whole(size, t);
        for (const bool shards : {true, false})
            for (const std::size_t prefetch : {0u, 2u})
                for (const bool reshards : {true, false})
                    CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                              auto given = initial_tensors(t.counts, t.dtype);
                              ShardedParameters<ThreadBackend, AdamW> sharded(
                                  comm, given, AdamW{}, awkward_units,
                                  {.shard_gradients = shards, .prefetch = prefetch, .reshard_after_forward = reshards});
                              train_with_discarded(sharded, t, shards ? 2 : 1, finding);
                              finding.check(first_difference(expected, weights(sharded)).empty(),
                                            first_difference(expected, weights(sharded)) + " differs");
                          }) == "");
    }
}

TEST_CASE("micro-batches under no_sync() that are discarded leave no trace, before finish() and after it") {
    const Training t{.micro_batches = 2};
    for (const int size : rank_counts(1, 3))
        for (const bool finishes : {false, true})
            for (const Accumulation accumulation : {Accumulation::in_gradients, Accumulation::in_buckets}) {
                const auto expected = weights_of_whole(size, t);
                CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                          auto model = initial_tensors(t.counts, t.dtype);
                          ShardedOptimizer<ThreadBackend, AdamW> sharded(comm, model, AdamW{}, {.reducer = {.accumulation = accumulation}});
                          for (int s = 0; s < t.steps; ++s) {
                              for (const bool discarded : {true, false}) {
                                  for (int m = 0; m < t.micro_batches; ++m) {
                                      if (discarded && m > 0 && !finishes) break;
                                      std::optional<decltype(sharded.no_sync())> guard;
                                      if (m == 0) guard.emplace(sharded.no_sync());
                                      for (std::size_t i = model.size(); i-- > 0;) {
                                          const bool adds = accumulation == Accumulation::in_gradients && m > 0;
                                          write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(),
                                                         discarded ? 1000 + s : t.batch(s, m), i, adds);
                                          sharded.mark_ready(i);
                                      }
                                  }
                                  if (finishes || !discarded) sharded.finish();
                                  if (discarded) sharded.discard();
                              }
                              const double norm = sharded.gradient_norm() / t.micro_batches;
                              sharded.step(gradsync::clip_factor(norm, t.max_norm) / t.micro_batches);
                          }
                          finding.check(first_difference(expected, weights(sharded)).empty(),
                                        first_difference(expected, weights(sharded)) + " differs");
                      }) == "");
            }
}

TEST_CASE("a parameter that only a discarded backward used is not stepped") {
    const auto check = [](auto stage) {
        return findings(2, [&](ThreadBackend comm, Finding& finding) {
            auto model = initial_tensors({100, 200, 300}, DType::f32);
            const auto before = model;
            ShardedOptimizer<ThreadBackend, AdamW, decltype(stage)> sharded(comm, model, AdamW{},
                                                                            {.reducer = {.unused = UnusedParameters::find_unused}});
            for (int s = 0; s < 3; ++s)
                for (const bool discarded : {true, false}) {
                    for (const std::size_t i : {2u, 1u, 0u}) {
                        if (i == 1 && !discarded) continue;
                        write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), s, i);
                        sharded.mark_ready(i);
                    }
                    sharded.finish();
                    if (discarded) sharded.discard();
                    else sharded.step();
                }
            finding.check(model[1].value == before[1].value, "p1 was stepped");
            finding.check(model[2].value != before[2].value, "p2 was not");
        });
    };
    CHECK(check(Zero1{}) == "");
    CHECK(check(Zero2{}) == "");
}

TEST_CASE("discard() in the middle of a backward, and while a guard lives, is refused, and nothing is lost by it") {
    const Training t;
    const auto expected = weights_of_whole(2, t);
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors(t.counts, t.dtype);
              ShardedOptimizer<ThreadBackend, AdamW> sharded(comm, model, AdamW{});
              for (int s = 0; s < t.steps; ++s) {
                  {
                      const auto guard = sharded.no_sync();
                      check_refused(
                          finding, [&] { sharded.discard(); }, "a guard of no_sync() lives");
                  }
                  for (std::size_t i = model.size(); i-- > 0;) {
                      write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), s, i);
                      sharded.mark_ready(i);
                      check_refused(
                          finding, [&] { sharded.discard(); }, "call finish() first");
                  }
                  sharded.finish();
                  sharded.step(gradsync::clip_factor(sharded.gradient_norm(), t.max_norm));
              }
              finding.check(first_difference(expected, weights(sharded)).empty(),
                            first_difference(expected, weights(sharded)) + " differs");
          }) == "");
}

TEST_CASE("discard() while a guard of no_sync() lives is refused before it drops the step, whose weights are then the same") {
    const auto train = [](bool tries) {
        std::vector<Bytes> result;
        run_threads(2, [&](ThreadBackend comm) {
            auto model = initial_tensors({30, 40}, DType::f32);
            ShardedOptimizer sharded(comm, model, Sgd{}, StepInside{});
            for (int step = 0; step < 2; ++step) {  // the first compares weights, and so does not step inside the reduction
                for (std::size_t i = 2; i-- > 0;) {
                    write(sharded.acquire_gradient(i), constant_bytes(DType::f32, model[i].count(), comm.rank() + 1));
                    sharded.mark_ready(i);
                }
                const auto guard = sharded.no_sync();
                sharded.finish();
                if (tries) CHECK(outcome_of([&] { sharded.discard(); }).says("a guard of no_sync() lives"));
                sharded.step();
            }
            if (comm.rank() == 0) result = weights(sharded);
        });
        return result;
    };
    CHECK(train(true) == train(false));
}
