// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/sharding.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// Some steps of a training from step `first` on.
template <class Sharded>
void train(Sharded& sharded, std::vector<Tensor>& model, const Training& t, int first, int last, std::vector<double>* norms = nullptr) {
    const int rank = sharded.backend().rank();
    for (int s = first; s < last; ++s) {
        for (std::size_t i = 0; i < model.size(); ++i) sharded.wait_parameter(i);  // the forward
        for (int m = 0; m < t.micro_batches; ++m) {
            std::optional<decltype(sharded.no_sync())> guard;
            const bool pooled = Sharded::stage_pools;
            if (!pooled && m + 1 < t.micro_batches) guard.emplace(sharded.no_sync());
            for (std::size_t i = model.size(); i-- > 0;) {
                write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), rank, t.batch(s, m), i, m > 0 && !pooled);
                sharded.mark_ready(i);
            }
            if (pooled) sharded.finish();
        }
        if (!Sharded::stage_pools) sharded.finish();
        const double micro = Sharded::stage_pools ? 1 : t.micro_batches;  // stage 1 holds their sum
        const double norm = sharded.gradient_norm() / micro;
        if (norms != nullptr && rank == 0) norms->push_back(norm);
        sharded.step((t.max_norm > 0 ? gradsync::clip_factor(norm, t.max_norm) : 1.0) / micro);
    }
    sharded.flush();
}

template <class Stage, class Buckets, class Overlap>
std::string difference_from_whole(int size, const Training& t, ParameterStorage parameters, Buckets buckets = {}, Overlap overlap = {}) {
    std::vector<double> expected_norms, norms;
    const std::vector<Bytes> expected = weights_of_whole(size, t, AdamW{{0.01, 0.02}}, &expected_norms);
    std::string found = findings(size, [&](ThreadBackend comm, Finding& finding) {
        auto model = initial_tensors(t.counts, t.dtype);
        ShardedOptimizer<ThreadBackend, AdamW, Stage, Buckets, Overlap> sharded(
            comm, model, AdamW{{0.01, 0.02}}, {.reducer = t.reducer, .parameters = parameters}, buckets, overlap);
        train(sharded, model, t, 0, t.steps, &norms);
        finding.check(first_difference(expected, weights(sharded)).empty(), first_difference(expected, weights(sharded)) + " differs");
    });
    if (found.empty() && norms != expected_norms) found = "the norms differ";
    return found;
}

template <class Stage>
void check_all_policies(const Training& t) {
    for (const int size : rank_counts()) {
        CAPTURE(size);
        using enum ParameterStorage;
        CHECK(difference_from_whole<Stage, Flat, NoOverlap>(size, t, borrowed) == "");
        CHECK(difference_from_whole<Stage, SizeCappedBuckets, OverlapBackward>(size, t, in_buckets, SizeCappedBuckets(4096)) == "");
        CHECK(difference_from_whole<Stage, PerParameter, OverlapForward>(size, t, borrowed) == "");
        CHECK(difference_from_whole<Stage, SizeCappedBuckets, OverlapForward>(size, t, in_buckets, SizeCappedBuckets(8192)) == "");
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

TEST_CASE("f64 weights, and 16-bit weights with f32 master weights") {
    for (const DType dtype : {DType::f64, DType::bf16, DType::f16}) {
        const Training t{.dtype = dtype};
        CAPTURE(name_of(dtype));
        for (const int size : rank_counts(1, 3)) {
            using enum ParameterStorage;
            CHECK(difference_from_whole<Zero1, SizeCappedBuckets, OverlapBackward>(size, t, borrowed) == "");
            CHECK(difference_from_whole<Zero2, SizeCappedBuckets, OverlapBackward>(size, t, in_buckets, SizeCappedBuckets(2048)) == "");
        }
    }
}

namespace {

/// Gradients that live with the library, as options ask for them: those of stage 2 always do.
template <class Stage>
GradientStorage with_library(Stage) {
    return Stage::shards_gradients ? GradientStorage::automatic : GradientStorage::in_buckets;
}

}  // namespace

TEST_CASE("weights, gradients and state lie where elements of their type may") {
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

TEST_CASE("bf16 weights whose gradients travel in f32") {
    Training t{.dtype = DType::bf16};
    t.reducer.reduce_dtype = DType::f32;
    // The oracle gets its averages back in bf16, the shards keep them in f32: within what that rounds away.
    const auto expected = weights_of_whole(3, t);
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors(t.counts, t.dtype);
              ShardedOptimizer<ThreadBackend, AdamW> sharded(comm, model, AdamW{}, {.reducer = t.reducer});
              train(sharded, model, t, 0, t.steps);
              for (std::size_t i = 0; i < model.size(); ++i) {
                  const auto a = numbers(sharded.parameter_value(i)), b = numbers({expected[i].data(), model[i].count(), DType::bf16});
                  for (std::size_t k = 0; k < a.size(); ++k)
                      finding.check(std::abs(a[k] - b[k]) <= 0.02 + std::abs(b[k]) / 64,
                                    "p" + std::to_string(i) + " is " + std::to_string(a[k]) + ", not " + std::to_string(b[k]));
              }
          }) == "");
}

TEST_CASE("micro-batches: stage 1 adds them up as a whole trainer does, stage 2 over the ranks first") {
    Training t{.micro_batches = 3};
    using enum ParameterStorage;
    for (const int size : rank_counts(1, 3))
        CHECK(difference_from_whole<Zero1, SizeCappedBuckets, OverlapBackward>(size, t, borrowed) == "");
    // Sgd, as Adam's division makes any difference of a tiny gradient a large one.
    const auto expected = weights_of_whole(3, t, Sgd{});
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors(t.counts, t.dtype);
              ShardedOptimizer<ThreadBackend, Sgd, Zero2> sharded(comm, model, Sgd{});
              train(sharded, model, t, 0, t.steps);
              for (std::size_t i = 0; i < model.size(); ++i) {
                  const auto a = numbers(sharded.parameter_value(i)), b = numbers({expected[i].data(), model[i].count(), DType::f32});
                  for (std::size_t k = 0; k < a.size(); ++k)
                      finding.check(std::abs(a[k] - b[k]) <= 1e-6 * (1 + std::abs(b[k])), "too far off");
              }
          }) == "");
}

TEST_CASE("a rank keeps its share of the state, and of the gradients in stage 2") {
    const std::vector<std::size_t> counts = {60000, 200, 40000, 300};
    const std::size_t elements = 100500;
    for (const int size : {1, 2, 4}) {
        CAPTURE(size);
        CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                  auto model = initial_tensors(counts, DType::bf16);
                  // Padding: a share is rounded up to an element, a bucket's part to 64 bytes, and gaps are below 64 bytes a parameter.
                  const std::size_t padding = 4 * 64 + 4 * 64, share = elements / static_cast<std::size_t>(size);
                  const auto within = [&](std::size_t bytes, std::size_t least) { return bytes >= least && bytes <= least + 2 * padding; };
                  ShardedOptimizer<ThreadBackend, AdamW, Zero1, Flat> one(
                      comm, model, AdamW{},
                      {.reducer = {.gradients = GradientStorage::in_buckets}, .parameters = ParameterStorage::in_buckets});
                  finding.check(within(one.memory().parameters, 2 * elements), "stage 1: weights");
                  finding.check(within(one.memory().gradients, 2 * elements), "stage 1: gradients");
                  finding.check(within(one.memory().master_weights, 4 * share), "stage 1: master weights");
                  finding.check(within(one.memory().optimizer_state, 8 * share), "stage 1: optimizer");
                  ShardedOptimizer<ThreadBackend, AdamW, Zero2, PerParameter> two(comm, model, AdamW{},
                                                                                  {.parameters = ParameterStorage::in_buckets});
                  // Shards in f32, and two slots: as large as the two largest buckets.
                  finding.check(within(two.memory().gradients, 4 * share + 2 * (60000 + 40000)),
                                "stage 2: gradients are " + std::to_string(two.memory().gradients));
                  finding.check(within(two.memory().optimizer_state, 8 * share), "stage 2: optimizer");
              }) == "");
    }
}

TEST_CASE("state that p ranks collect goes on, on q ranks, to the same bits") {
    const Training t{.steps = 6};
    for (const int from : {1, 2, 4}) {
        // The same data on every rank: the mean does not depend on how many there are.
        std::vector<std::vector<Bytes>> saved;
        int steps = 0;
        const auto same_data = [](auto& sharded, std::vector<Tensor>& model, int first, int last) {
            for (int s = first; s < last; ++s) {
                for (std::size_t i = model.size(); i-- > 0;) {
                    write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), 0, s, i);
                    sharded.mark_ready(i);
                }
                sharded.finish();
                sharded.step();
            }
        };
        run_threads(
            from,
            [&](ThreadBackend comm) {
                auto model = initial_tensors(t.counts, t.dtype);
                ShardedOptimizer<ThreadBackend, AdamW> sharded(comm, model, AdamW{});
                same_data(sharded, model, 0, 3);
                if (comm.rank() == 0) saved.assign(model.size(), std::vector<Bytes>(sharded.array_count()));
                sharded.collect_state(0, [&](std::size_t i, std::size_t a, std::size_t first, ConstBufferView piece) {
                    if (saved[i][a].size() != first * sizeof(float)) saved[i][a].clear();
                    const Bytes bytes = bytes_of(piece);
                    saved[i][a].insert(saved[i][a].end(), bytes.begin(), bytes.end());
                });
                if (comm.rank() == 0) steps = sharded.optimizer().steps;
            },
            patient);
        Training plain = t;
        plain.max_norm = 0;
        for (const int to : {1, 2, 3}) {
            CAPTURE(from);
            CAPTURE(to);
            std::vector<Bytes> whole;
            run_threads(1, [&](ThreadBackend comm) {
                auto model = initial_tensors(t.counts, t.dtype);
                ShardedOptimizer<ThreadBackend, AdamW> alone(comm, model, AdamW{});
                same_data(alone, model, 0, 6);
                whole = weights(alone);
            });
            CHECK(findings(to, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors(t.counts, t.dtype);  // zeros: all comes from what was saved
                      ShardedOptimizer<ThreadBackend, AdamW, Zero2, SizeCappedBuckets> sharded(comm, model, AdamW{.steps = steps}, {},
                                                                                               SizeCappedBuckets(4000));
                      sharded.distribute_state(0, [&](std::size_t i, std::size_t a, std::size_t first, BufferView piece) {
                          std::memcpy(piece.data, saved[i][a].data() + first * sizeof(float), piece.bytes());
                      });
                      same_data(sharded, model, 3, 6);
                      // Means of equal numbers are exact for 1, 2 and 4 ranks; thirds are rounded.
                      const auto now = weights(sharded);
                      if (to != 3) finding.check(first_difference(whole, now).empty(), first_difference(whole, now) + " differs");
                      for (std::size_t i = 0; i < model.size(); ++i) {
                          const auto a = numbers(sharded.parameter_value(i)), b = numbers({whole[i].data(), model[i].count(), DType::f32});
                          for (std::size_t k = 0; k < a.size(); ++k)
                              finding.check(std::abs(a[k] - b[k]) <= 1e-5 * (1 + std::abs(b[k])), "too far off");
                      }
                  }) == "");
        }
    }
}

TEST_CASE("buckets are planned anew from the order of readiness, and state moves to its new owners") {
    const Training t{.steps = 6};
    const auto expected = weights_of_whole(3, t, AdamW{});
    const auto check = [&](auto stage) {
        CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
                  auto model = initial_tensors(t.counts, t.dtype);
                  ShardedOptimizer<ThreadBackend, AdamW, decltype(stage)> sharded(
                      comm, model, AdamW{}, {.parameters = ParameterStorage::in_buckets}, SizeCappedBuckets(4096));
                  for (int s = 0; s < t.steps; ++s) {
                      for (const std::size_t i : shuffled(model.size(), 3)) {
                          write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), s, i);
                          sharded.mark_ready(i);
                      }
                      sharded.finish();
                      sharded.step(gradsync::clip_factor(sharded.gradient_norm(), t.max_norm));
                      const BucketPlan before = sharded.plan();
                      if (s == 2) finding.check(sharded.rebuild_buckets() && sharded.plan() != before, "the plan has not changed");
                  }
                  finding.check(first_difference(expected, weights(sharded)).empty(),
                                first_difference(expected, weights(sharded)) + " differs");
              }) == "");
    };
    check(Zero1{});
    check(Zero2{});
}

TEST_CASE("parameters that are unfrozen take part from then on, with fresh state") {
    // The oracle: the frozen ones have a learning rate of zero at first, and no state.
    const std::vector<std::size_t> counts = {300, 50, 2000};
    const auto run = [&](ThreadBackend comm, bool sharded_run, auto&& done) {
        auto model = initial_tensors(counts, DType::f32);
        if (sharded_run) {
            model[0].requires_grad = false;
            ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, model, Sgd{}, {.parameters = ParameterStorage::borrowed});
            for (int s = 0; s < 4; ++s) {
                const std::size_t which[] = {0};
                if (s == 2) sharded.unfreeze(which);
                for (std::size_t i = model.size(); i-- > (s < 2 ? 1u : 0u);) {
                    write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), s, i);
                    sharded.mark_ready(i);
                }
                sharded.finish();
                sharded.step();
            }
        } else {
            WholeOptimizer<Sgd> whole(Sgd{}, model);
            Reducer sync(comm, model);
            for (int s = 0; s < 4; ++s) {
                for (std::size_t i = model.size(); i-- > 0;) {
                    write_gradient(sync.gradient_view(i), model[i].value_view(), comm.rank(), s, i);
                    sync.mark_ready(i);
                }
                sync.finish();
                for (std::size_t i = s < 2 ? 1 : 0; i < model.size(); ++i) whole.step(i, sync.gradient_view(i), 1, model[i].value_view());
            }
        }
        done(model);
    };
    std::vector<Bytes> expected;
    run_threads(3, [&](ThreadBackend comm) {
        run(comm, false, [&](auto& model) {
            if (comm.rank() == 0)
                for (const Tensor& p : model) expected.push_back(p.value);
        });
    });
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              run(comm, true, [&](auto& model) {
                  for (std::size_t i = 0; i < model.size(); ++i) finding.check(model[i].value == expected[i], model[i].name + " differs");
              });
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

TEST_CASE("stage 2: gradients that several threads compute, in an order of their own") {
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

TEST_CASE("a parameter that only an early micro-batch used is stepped all the same") {
    for (const bool late : {false, true})
        CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
                  auto model = initial_tensors({100, 200}, DType::f32);
                  const Bytes before = model[1].value;
                  ShardedOptimizer<ThreadBackend, Sgd, Zero2> sharded(comm, model, Sgd{},
                                                                      {.reducer = {.unused = UnusedParameters::find_unused}});
                  for (int s = 0; s < 2; ++s) {
                      for (int m = 0; m < 2; ++m) {
                          for (std::size_t i = 2; i-- > 0;) {
                              if (i == 1 && (s == 1 || (m == 1) != late)) continue;  // nobody uses it in the second step
                              write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), m, i);
                              sharded.mark_ready(i);
                          }
                          sharded.finish();
                      }
                      const Bytes last = model[1].value;
                      sharded.step();
                      finding.check((model[1].value != last) == (s == 0), s == 0 ? "p1 was not stepped" : "p1 was stepped");
                  }
              }) == "");
}

TEST_CASE("weights, and ranks that have run out of data, in every stage") {
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

TEST_CASE("stage 2 with a thread that makes progress, and sums instead of means") {
    using enum ParameterStorage;
    for (const int size : rank_counts(1, 3)) {
        CHECK(difference_from_whole<Zero2>(size, {}, in_buckets, SizeCappedBuckets(3000), OverlapBackward(Progress::thread)) == "");
        CHECK(difference_from_whole<Zero2, SizeCappedBuckets, OverlapBackward>(size, {.reducer = {.averaging = Averaging::sum}},
                                                                               borrowed) == "");
    }
}

TEST_CASE("a rank that fails in its optimizer is named on the others") {
    struct Failing : Sgd {
        int rank = 0;
        void step(const OptimizerSlice<float>& s) const {
            if (rank == 1) throw std::runtime_error("the optimizer broke");
            Sgd::step(s);
        }
    };
    const auto seen = outcomes(3, [](ThreadBackend comm) {
        auto model = initial_tensors({1000, 1000}, DType::f32);
        ShardedOptimizer<ThreadBackend, Failing> sharded(comm, model, Failing{{}, comm.rank()});
        for (std::size_t i = 0; i < 2; ++i) sharded.mark_ready(i);
        sharded.finish();
        sharded.step();
    });
    CHECK(seen[1].text == "not a gradsync::Error: the optimizer broke");
    for (const std::size_t r : {0u, 2u}) {
        CHECK(seen[r].is(Errc::peer_failed));
        CHECK(seen[r].says("rank 1"));
        CHECK(seen[r].says("the optimizer broke"));
    }
}

TEST_CASE("a guard of no_sync() may live until the step is over") {
    for (const int ranks : rank_counts())
        CHECK(findings(ranks, [](ThreadBackend comm, Finding& finding) {
                  auto model = initial_tensors({10, 20}, DType::f32);
                  for (Tensor& p : model) p.gradient = constant_bytes(p.dtype, p.count(), 1);
                  ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, model, Sgd{});
                  const auto guard = sharded.no_sync();
                  for (const std::size_t i : {1u, 0u}) sharded.mark_ready(i);
                  sharded.finish();
                  finding.check(sharded.gradient_norm() == std::sqrt(30.0), "another norm");
                  sharded.step();
              }) == "");
}

TEST_CASE("misuse is told") {
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
              auto model = initial_tensors({10}, DType::f64);
              ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, model, Sgd{});
          }) == "ShardedOptimizer on rank 0: parameter 'p0' is f64, and the optimizer has no step(OptimizerSlice<double>)");
    CHECK(says([&](ThreadBackend comm) {
              auto model = model_of();
              ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, model, Sgd{});
              for (std::size_t i = 0; i < 2; ++i) sharded.mark_ready(i);
              sharded.finish();
              (void)sharded.rebuild_buckets();
          }) == "rebuild_buckets on rank 0: gradients of this step are averaged already; call step() first");
    CHECK(says([&](ThreadBackend comm) {
              auto model = initial_tensors({10, 20}, DType::f64);
              model[0].requires_grad = model[1].requires_grad = false;
              ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, model, Sgd{});
              const std::size_t which[] = {1};
              sharded.unfreeze(which);
          }) == "ShardedOptimizer on rank 0: parameter 'p1' is f64, and the optimizer has no step(OptimizerSlice<double>)");
    CHECK(says([&](ThreadBackend comm) {
              auto model = model_of();
              ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, model, Sgd{}, {.reducer = {.gradients = GradientStorage::pooled}});
          }) == "ShardedOptimizer on rank 0: pooled gradients are for stage 2: write Zero2");
    CHECK(says([&](ThreadBackend comm) {
              std::vector<float> gradient(5);
              std::vector<ParameterView> views = {{.name = "w", .gradient = buffer(gradient)}};
              ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, views, Sgd{});
          }) == "ShardedOptimizer on rank 0: parameter 'w' has no value; give one in its ParameterView or parameter_traits");
    for (const auto& [count, storage] : {std::pair{5u, ParameterStorage::borrowed}, std::pair{4u, ParameterStorage::in_buckets}})
        CHECK(says([&, count = count, storage = storage](ThreadBackend comm) {
                  std::vector<float> gradient(5);
                  std::vector<ParameterView> views = {{.name = "w", .value = {nullptr, count, DType::f32}, .gradient = buffer(gradient)}};
                  ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, views, Sgd{}, {.parameters = storage});
              }).find("'w' has no value") != std::string::npos);
}

namespace {

/// What `make(backend, parameters)` says where 'embedding' and 'head' have gradients of their own, and these values.
template <class Make>
std::string with_values(std::span<float> one, std::span<float> other, Make&& make, bool frozen = false) {
    return outcomes(1,
                    [&](ThreadBackend comm) {
                        std::vector<std::vector<float>> gradients = {std::vector<float>(one.size()), std::vector<float>(other.size())};
                        std::vector views = {parameter("embedding", one, gradients[0]), parameter("head", other, gradients[1])};
                        views[1].requires_grad = !frozen;
                        views[1].may_be_empty = true;
                        make(comm, views);
                    })[0]
        .text;
}

}  // namespace

TEST_CASE("tied weights that are registered twice, with gradients of their own, are refused: one update would be lost") {
    std::vector<float> memory(10);
    const std::span<float> all(memory);
    const std::string expected =
        "ShardedOptimizer on rank 0: the values of 'embedding' and 'head' share memory, and each would be updated without the other; register tied weights once, with `uses` of 2";
    const auto check = [&](auto&& make) {
        CHECK(with_values(all, all, make) == expected);
        CHECK(with_values(all, all.subspan(9), make) == expected);
        CHECK(with_values(all.subspan(5), all.first(6), make) == expected);
        CHECK(with_values(all.first(5), all.subspan(5), make) == "");
        CHECK(with_values(all, all.first(0), make) == "");
        CHECK(with_values(all, all, make, true) == "");
    };
    check([](auto comm, auto& views) { ShardedOptimizer<ThreadBackend, Sgd>(comm, views, Sgd{}); });
    check([](auto comm, auto& views) { ShardedOptimizer<ThreadBackend, Sgd, Zero2>(comm, views, Sgd{}); });
    check([](auto comm, auto& views) {
        ShardedOptimizer<ThreadBackend, Sgd>(comm, views, Sgd{}, {.parameters = ParameterStorage::in_buckets});
    });
    // Unfreezing one of them is the same mistake.
    CHECK(with_values(
              all, all,
              [](auto comm, auto& views) {
                  ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, views, Sgd{});
                  const std::size_t which[] = {1};
                  sharded.unfreeze(which);
              },
              true) == expected);
}

TEST_CASE("weights that live in the buckets need no memory of the trainer's, not even at first") {
    const Training t;
    const std::vector<Bytes> expected = weights_of_whole(3, t, AdamW{{0.01, 0.02}});
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors(t.counts, t.dtype);
              std::vector<ParameterView> views;
              for (Tensor& p : model)
                  views.push_back(
                      {.name = p.name, .value = {nullptr, p.count(), p.dtype}, .gradient = p.gradient_view(), .may_be_empty = true});
              ShardedOptimizer<ThreadBackend, AdamW, Zero1, Flat, OverlapBackward> sharded(comm, views, AdamW{{0.01, 0.02}},
                                                                                           {.parameters = ParameterStorage::in_buckets});
              for (std::size_t i = 0; i < model.size(); ++i) {
                  finding.check(holds(sharded.parameter_value(i), Bytes(model[i].value.size())), model[i].name + " is not zero");
                  if (comm.rank() == 0) kernel::copy(model[i].value_view(), sharded.parameter_value(i));
              }
              sharded.adopt_values();
              sharded.broadcast_parameters();
              train(sharded, model, t, 0, t.steps);
              finding.check(first_difference(expected, weights(sharded)).empty(),
                            first_difference(expected, weights(sharded)) + " differs");
          }) == "");
}

TEST_CASE("weights that are copied may differ between ranks, be shared by them, or go, before the root's are broadcast") {
    std::vector<float> shared(50, 3.0f);
    const auto check = [&](auto make) {
        return findings(3, [&](ThreadBackend comm, Finding& finding) {
            auto model = std::make_unique<std::vector<Tensor>>(initial_tensors({50}, DType::f32));
            write((*model)[0].value_view(), constant_bytes(DType::f32, 50, comm.rank()));
            std::vector<ParameterView> views = {parameter_view((*model)[0])};
            views.push_back({.name = "shared", .value = buffer(shared), .gradient = {nullptr, 50, DType::f32}});
            views[0].gradient.data = nullptr;
            auto sharded = make(comm, views);
            sharded->broadcast_parameters();
            model.reset();
            for (int s = 0; s < 2; ++s) {
                for (std::size_t i = 2; i-- > 0;) {
                    write(sharded->acquire_gradient(i), constant_bytes(DType::f32, 50, 0));
                    sharded->mark_ready(i);
                }
                sharded->finish();
                sharded->step();
            }
            finding.check(sharded->statistics().steps == 2, "no steps");
        });
    };
    using Whole = ShardedOptimizer<ThreadBackend, Sgd>;
    using Parts = ShardedParameters<ThreadBackend, Sgd>;
    CHECK(check([](ThreadBackend comm, auto& views) {
              return std::make_unique<Whole>(
                  comm, views, Sgd{},
                  ShardingOptions{.reducer = {.gradients = GradientStorage::in_buckets}, .parameters = ParameterStorage::in_buckets});
          }) == "");
    CHECK(check([](ThreadBackend comm, auto& views) { return std::make_unique<Parts>(comm, views, Sgd{}, Units({0, 1})); }) == "");
}

TEST_CASE("ranks whose sharding differs are told, all the same") {
    const auto seen = outcomes(2, [](ThreadBackend comm) {
        auto model = initial_tensors({10, 20}, DType::f32);
        ShardedOptimizer<ThreadBackend, Sgd> sharded(
            comm, model, Sgd{}, {.parameters = comm.rank() == 0 ? ParameterStorage::borrowed : ParameterStorage::in_buckets});
    });
    for (const Outcome& outcome : seen) {
        CHECK(outcome.is(Errc::parameter_mismatch));
        CHECK(outcome.text == seen[0].text);
        CHECK(outcome.says("parameters=in_buckets"));
    }
    const auto types = outcomes(2, [](ThreadBackend comm) {
        auto model = initial_tensors({10, 20}, comm.rank() == 0 ? DType::f32 : DType::bf16);
        std::vector<float> gradient(20);
        std::vector<ParameterView> views = {{.name = "w", .value = model[1].value_view(), .gradient = buffer(gradient)}};
        ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, views, Sgd{});
    });
    for (const Outcome& outcome : types) CHECK(outcome.is(Errc::parameter_mismatch));
}

TEST_CASE("two optimizers of equal buckets, whose weights ranks gather in another order, are told apart") {
    for (const int ranks : {2, 3})
        for (const Outcome& outcome : outcomes(ranks, [](ThreadBackend comm) {
                 auto one = initial_tensors({100}, DType::f32), other = one;
                 ShardedOptimizer<ThreadBackend, Sgd> first(comm, one, Sgd{}), second(comm, other, Sgd{});
                 first.mark_ready(0);
                 first.finish();
                 second.mark_ready(0);
                 second.finish();
                 const bool odd = comm.rank() == 1;
                 (odd ? second : first).step();
                 (odd ? first : second).step();
                 first.flush();
                 second.flush();
             })) {
            INFO(outcome.text);
            CHECK(outcome.is(Errc::collective_mismatch));
            CHECK(outcome.says("rank 0 started all_gather(f32, "));
            CHECK(outcome.says(" for bucket 0 of Reducer #0"));
            CHECK(outcome.says(" for bucket 0 of Reducer #1"));
        }
}

TEST_CASE("weights come from the root") {
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              for (const ParameterStorage storage : {ParameterStorage::borrowed, ParameterStorage::in_buckets}) {
                  auto model = initial_tensors({100, 7, 300}, DType::bf16);
                  model[1].requires_grad = false;
                  const auto expected = model;
                  if (comm.rank() != 1)
                      for (Tensor& p : model) p.value = constant_bytes(p.dtype, p.count(), comm.rank());
                  ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, model, Sgd{}, {.parameters = storage});
                  sharded.broadcast_parameters(1);
                  for (std::size_t i = 0; i < model.size(); ++i)
                      finding.check(holds(sharded.parameter_value(i), expected[i].value), model[i].name + " is not the root's");
              }
          }) == "");
}

namespace {

/// The weights of a whole trainer, with Sgd, that steps parameter i from step `since[i]` on: before, it was frozen.
std::vector<Bytes> weights_of_thawed(int size, const std::vector<std::size_t>& sizes, const std::vector<int>& since, int steps) {
    std::vector<Bytes> result;
    run_threads(
        size,
        [&](ThreadBackend comm) {
            auto model = initial_tensors(sizes, DType::f32);
            WholeOptimizer<Sgd> whole(Sgd{}, model);
            Reducer sync(comm, model);
            for (int s = 0; s < steps; ++s) {
                for (std::size_t i = model.size(); i-- > 0;) {
                    write_gradient(sync.gradient_view(i), model[i].value_view(), comm.rank(), s, i);
                    sync.mark_ready(i);
                }
                sync.finish();
                for (std::size_t i = 0; i < model.size(); ++i)
                    if (s >= since[i]) whole.step(i, sync.gradient_view(i), 1, model[i].value_view());
            }
            if (comm.rank() == 0)
                for (const Tensor& p : model) result.push_back(p.value);
        },
        patient);
    return result;
}

/// Computes and marks the gradients of micro-batch `batch` of what takes part; `poisoned` ones are not finite.
template <class Sharded>
void sharded_backward(Sharded& sharded, int batch, bool poisoned = false) {
    for (std::size_t i = sharded.parameters().size(); i-- > 0;) {
        if (!sharded.parameters()[i].requires_grad) continue;
        const auto compute = [&] {
            const BufferView gradient = sharded.acquire_gradient(i);
            write_gradient(gradient, sharded.parameter_value(i), sharded.backend().rank(), batch, i);
            if (poisoned) write(gradient, constant_bytes(gradient.dtype, gradient.count, std::numeric_limits<double>::infinity()));
            sharded.mark_ready(i);
        };
        if constexpr (requires { sharded.unit_of(i); }) {
            const auto use = sharded.gather(sharded.unit_of(i));
            compute();
        } else {
            sharded.wait_parameter(i);
            compute();
        }
    }
}

template <class Call>
void check_refused(Finding& finding, Call&& call, const std::string& words, const std::string& parameter = {}) {
    const Outcome outcome = outcome_of(call);
    finding.check(outcome.is(Errc::invalid_argument) && outcome.says(words) && outcome.error->context().parameter == parameter,
                  words + ": " + outcome.text);
}

}  // namespace

TEST_CASE("a borrowed parameter without gradient memory is not unfrozen, and the training goes on") {
    const std::vector<std::size_t> sizes = {300, 40, 50, 2000};
    constexpr int not_at_all = 99;
    for (const int size : rank_counts(1, 3)) {
        const auto expected = weights_of_thawed(size, sizes, {not_at_all, 3, 0, 0}, 5);
        CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                  auto model = initial_tensors(sizes, DType::f32);
                  model[0].requires_grad = model[1].requires_grad = false;
                  std::vector<ParameterView> views = views_of(model);
                  views[0].gradient.data = nullptr;
                  ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, views, Sgd{});
                  for (int s = 0; s < 5; ++s) {
                      const BucketPlan before = sharded.plan();
                      const std::vector<std::size_t> bad = {0}, mixed = {1, 0}, good = {1};
                      for (const auto& which : {bad, mixed})
                          check_refused(
                              finding, [&] { sharded.unfreeze(which); }, "parameter 'p0' has no gradient memory", "p0");
                      finding.check(sharded.plan() == before && !sharded.parameters()[0].requires_grad &&
                                        sharded.parameters()[1].requires_grad == (s > 3),
                                    "what was refused has changed something");
                      if (s == 3) sharded.unfreeze(good);
                      sharded_backward(sharded, s);
                      sharded.finish();
                      sharded.step();
                  }
                  finding.check(first_difference(expected, weights(sharded)).empty(),
                                first_difference(expected, weights(sharded)) + " differs");
              }) == "");
    }
}

TEST_CASE("parameters that cannot be trained are not unfrozen, and the training goes on") {
    for (const int size : rank_counts())
        for (const auto storage : {ParameterStorage::borrowed, ParameterStorage::in_buckets})
            CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                      auto model = initial_tensors({30, 40, 50, 30}, DType::f32);
                      std::vector<ParameterView> views = views_of(model);
                      std::vector<double> values(40);
                      std::vector<std::int32_t> counts(50);
                      views[1].value = buffer(values);
                      views[2].gradient = buffer(counts);
                      views[3].value = model[0].value_view();
                      for (const std::size_t i : {1u, 2u, 3u}) views[i].requires_grad = false;
                      ShardedOptimizer sharded(comm, views, Sgd{}, ShardingOptions{.parameters = storage});
                      for (int s = 0; s < 2; ++s) {
                          const auto refused = [&](std::size_t i, const std::string& words) {
                              const std::size_t which[] = {i};
                              const Outcome outcome = outcome_of([&] { sharded.unfreeze(which); });
                              finding.check(outcome.is(Errc::invalid_argument) && outcome.says(words), words + ": " + outcome.text);
                              finding.check(!sharded.parameters()[i].requires_grad, "it is trained");
                          };
                          refused(1, "'p1' is f64, and the optimizer");
                          refused(2, "'p2' has a gradient of i32");
                          if (storage == ParameterStorage::borrowed) refused(3, "the values of 'p0' and 'p3' share memory");
                          write(sharded.acquire_gradient(0), random_gradient(model[0], comm.rank(), s, 0));
                          sharded.mark_ready(0);
                          sharded.finish();
                          sharded.step();
                      }
                  }) == "");
}

TEST_CASE("an option without effect is refused") {
    run_threads(1, [](ThreadBackend comm) {
        auto model = initial_tensors({10, 20}, DType::f32);
        const ReducerOptions stored{.gradients = GradientStorage::in_buckets};
        CHECK(outcome_of([&] {
                  ShardedOptimizer<ThreadBackend, Sgd, Zero2>(comm, model, Sgd{}, {.reducer = stored});
              }).says("gradients of stage 2 are pooled; leave ReducerOptions::gradients out with Zero2"));
        CHECK(outcome_of([&] {
                  ShardedParameters<ThreadBackend, Sgd>(comm, model, Sgd{}, Units({0, 1}), {.reducer = stored});
              }).says("leave ReducerOptions::gradients out, and see shard_gradients"));
        const ReducerOptions often{.compare_weights_every = 10};
        const std::string not_compared = "weights that live with the library are compared once only";
        CHECK(outcome_of([&] {
                  ShardedParameters<ThreadBackend, Sgd>(comm, model, Sgd{}, Units({0, 1}), {.reducer = often});
              }).says(not_compared));
        CHECK(outcome_of([&] {
                  ShardedOptimizer<ThreadBackend, Sgd>(comm, model, Sgd{}, {.reducer = often, .parameters = ParameterStorage::in_buckets});
              }).says(not_compared));
    });
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

TEST_CASE("gradients that live with the library need no memory to be unfrozen") {
    const std::vector<std::size_t> sizes = {300, 50, 2000};
    const auto check = [&](auto stage, int size) {
        const auto expected = weights_of_thawed(size, sizes, {2, 0, 0}, 4);
        return findings(size, [&](ThreadBackend comm, Finding& finding) {
            auto model = initial_tensors(sizes, DType::f32);
            std::vector<ParameterView> views = views_of(model);
            views[0].requires_grad = false;
            views[0].gradient.data = nullptr;
            ShardedOptimizer<ThreadBackend, Sgd, decltype(stage)> sharded(comm, views, Sgd{},
                                                                          {.reducer = {.gradients = with_library(stage)}});
            for (int s = 0; s < 4; ++s) {
                const std::size_t which[] = {0};
                if (s == 2) sharded.unfreeze(which);
                sharded_backward(sharded, s);
                sharded.finish();
                sharded.step();
            }
            finding.check(first_difference(expected, weights(sharded)).empty(), first_difference(expected, weights(sharded)) + " differs");
        });
    };
    for (const int size : rank_counts(1, 3)) {
        CHECK(check(Zero1{}, size) == "");
        CHECK(check(Zero2{}, size) == "");
    }
}

TEST_CASE("after an unfreeze the ranks compare the weights in the buckets, not those in memory that they were copied from") {
    const std::vector<std::size_t> sizes = {300, 50, 2000};
    const auto check = [&](auto stage, int size) {
        const auto expected = weights_of_thawed(size, sizes, {2, 0, 0}, 4);
        return findings(size, [&](ThreadBackend comm, Finding& finding) {
            auto model = initial_tensors(sizes, DType::f32);
            model[0].requires_grad = false;
            for (Tensor& p : model)
                if (comm.rank() != 0) std::fill(p.value.begin(), p.value.end(), std::byte{1});
            ShardedOptimizer<ThreadBackend, Sgd, decltype(stage)> sharded(comm, model, Sgd{}, {.parameters = ParameterStorage::in_buckets});
            sharded.broadcast_parameters();
            for (int s = 0; s < 4; ++s) {
                const std::size_t which[] = {0};
                if (s == 2) sharded.unfreeze(which);
                sharded_backward(sharded, s);
                sharded.finish();
                sharded.step();
            }
            finding.check(first_difference(expected, weights(sharded)).empty(), first_difference(expected, weights(sharded)) + " differs");
        });
    };
    for (const int size : rank_counts(1, 3)) {
        CHECK(check(Zero1{}, size) == "");
        CHECK(check(Zero2{}, size) == "");
    }
}

TEST_CASE("weights that live in the buckets are read from the trainer's memory once: it may go before buckets are planned anew") {
    const std::vector<std::size_t> sizes = {300, 50, 2000};
    constexpr std::size_t page = 1 << 14;
    const auto check = [&](ParameterStorage storage, int size) {
        const auto expected = weights_of_thawed(size, sizes, {2, 0, 0}, 5);
        return findings(size, [&](ThreadBackend comm, Finding& finding) {
            auto model = initial_tensors(sizes, DType::f32);
            std::vector<ParameterView> views = views_of(model);
            views[0].requires_grad = false;
            // Reading this memory once it is gone ends the program.
            void* const memory = ::mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            views[2].value.data = memory;
            kernel::copy(model[2].value_view(), views[2].value);
            ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, views, Sgd{}, {.parameters = storage}, SizeCappedBuckets(4000));
            ::munmap(memory, page);
            sharded.broadcast_parameters();
            const std::size_t which[] = {0, 2};  // the second takes part already
            for (int s = 0; s < 5; ++s) {
                if (s == 2) sharded.unfreeze(which);
                for (std::size_t i = s < 2 ? 1 : 0; i < sizes.size(); ++i) {
                    write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), s, i);
                    if (storage == ParameterStorage::shared) comm.barrier().wait();
                    sharded.mark_ready(i);
                }
                sharded.finish();
                sharded.step();
                if (s == 0 || s == 3) finding.check(sharded.rebuild_buckets(), "the plan has not changed");
            }
            finding.check(first_difference(expected, weights(sharded)).empty(), first_difference(expected, weights(sharded)) + " differs");
        });
    };
    for (const int size : rank_counts()) {
        CAPTURE(size);
        CHECK(check(ParameterStorage::in_buckets, size) == "");
        CHECK(check(ParameterStorage::shared, size) == "");
    }
}

TEST_CASE("while micro-batches wait for their step nothing is unfrozen; once they are discarded, or stepped, it is") {
    const std::vector<std::size_t> sizes = {300, 50, 2000};
    for (const int size : rank_counts(1, 3))
        for (const Accumulation accumulation : {Accumulation::in_gradients, Accumulation::in_buckets})
            for (const bool discards : {true, false}) {
                const auto expected = weights_of_thawed(size, sizes, {discards ? 2 : 3, 0, 0}, 4);
                CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                          auto model = initial_tensors(sizes, DType::f32);
                          model[0].requires_grad = false;
                          ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, model, Sgd{}, {.reducer = {.accumulation = accumulation}});
                          const std::size_t which[] = {0};
                          for (int s = 0; s < 4; ++s) {
                              if (s == 2) {
                                  {
                                      const auto guard = sharded.no_sync();
                                      check_refused(
                                          finding, [&] { sharded.unfreeze(which); }, "no_sync()");
                                      // Of zeros where the step is to count it: the sum is that of the other micro-batch then.
                                      for (const std::size_t i : {2u, 1u}) {
                                          const double left = discards ? std::numeric_limits<double>::quiet_NaN() : 0;
                                          write(sharded.acquire_gradient(i), constant_bytes(DType::f32, sizes[i], left));
                                          sharded.mark_ready(i);
                                      }
                                      check_refused(
                                          finding, [&] { sharded.unfreeze(which); }, "no_sync()");
                                  }
                                  check_refused(
                                      finding, [&] { sharded.unfreeze(which); }, "discard()");
                                  finding.check(!sharded.parameters()[0].requires_grad, "p0 takes part");
                                  if (discards) {
                                      sharded.discard();
                                      sharded.unfreeze(which);
                                  }
                              }
                              if (s == 3 && !discards) sharded.unfreeze(which);
                              sharded_backward(sharded, s);
                              check_refused(
                                  finding, [&] { sharded.unfreeze(which); }, "marked ready already");
                              sharded.finish();
                              check_refused(
                                  finding, [&] { sharded.unfreeze(which); }, "averaged already");
                              sharded.step();
                          }
                          finding.check(first_difference(expected, weights(sharded)).empty(),
                                        first_difference(expected, weights(sharded)) + " differs");
                      }) == "");
            }
}

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

template <class Stage, class Buckets, class Overlap>
std::string difference_with_discarded(int size, const Training& t, ParameterStorage parameters, Buckets buckets = {},
                                      int micro_batches = 1) {
    const std::vector<Bytes> expected = weights_of_whole(size, t, AdamW{{0.01, 0.02}});
    return findings(size, [&](ThreadBackend comm, Finding& finding) {
        auto model = initial_tensors(t.counts, t.dtype);
        ShardedOptimizer<ThreadBackend, AdamW, Stage, Buckets, Overlap> sharded(comm, model, AdamW{{0.01, 0.02}},
                                                                                {.reducer = t.reducer, .parameters = parameters}, buckets);
        train_with_discarded(sharded, t, micro_batches, finding);
        sharded.flush();
        finding.check(first_difference(expected, weights(sharded)).empty(), first_difference(expected, weights(sharded)) + " differs");
    });
}

}  // namespace

TEST_CASE("a backward that is discarded leaves no trace: stages 1 and 2") {
    using enum ParameterStorage;
    for (const int size : rank_counts(1, 3)) {
        CAPTURE(size);
        CHECK(difference_with_discarded<Zero1, Flat, NoOverlap>(size, {}, borrowed) == "");
        CHECK(difference_with_discarded<Zero1, PerParameter, OverlapBackward>(size, {.reducer = {.gradients = GradientStorage::in_buckets}},
                                                                              in_buckets) == "");
        CHECK(difference_with_discarded<Zero1, SizeCappedBuckets, OverlapForward>(size, {}, borrowed, SizeCappedBuckets(4096)) == "");
        for (const int micro_batches : {1, 2}) {
            CHECK(difference_with_discarded<Zero2, Flat, NoOverlap>(size, {}, borrowed, {}, micro_batches) == "");
            CHECK(difference_with_discarded<Zero2, SizeCappedBuckets, OverlapBackward>(size, {.dtype = DType::bf16}, in_buckets,
                                                                                       SizeCappedBuckets(4096), micro_batches) == "");
            CHECK(difference_with_discarded<Zero2, PerParameter, OverlapForward>(size, {}, borrowed, {}, micro_batches) == "");
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

TEST_CASE("ranks whose frozen parameters differ, or whose values have another type, are told which, all the same") {
    struct Difference {
        std::string says;
        std::function<void(ParameterView&)> make;  ///< of p1, on the last rank
    };
    const auto narrow = [](ParameterView& p) { p.value.dtype = DType::bf16; };  // it lies in the same memory, as nobody gets to read it
    const auto check = [&](const Difference& difference, bool frozen, auto&& construct) {
        for (const int size : {2, 3}) {
            const auto seen = outcomes(size, [&](ThreadBackend comm) {
                auto model = initial_tensors({10, 20, 30}, DType::f32);
                model[1].requires_grad = !frozen;
                std::vector<ParameterView> views = views_of(model);
                if (comm.rank() == size - 1) difference.make(views[1]);
                construct(comm, views);
            });
            for (const Outcome& outcome : seen) {
                INFO(outcome.text);
                REQUIRE(outcome.is(Errc::parameter_mismatch));
                CHECK(outcome.error->context().parameter == "p1");
                CHECK(outcome.text == seen[0].text);
                CHECK(outcome.says("rank 0 has 'p1' f32 [20]"));
                CHECK(outcome.says("rank " + std::to_string(size - 1) + " has 'p1' "));
                CHECK(outcome.says(difference.says));
            }
        }
    };
    const auto check_all = [&](const Difference& difference, bool frozen) {
        CAPTURE(difference.says);
        CAPTURE(frozen);
        check(difference, frozen, [](auto comm, auto& views) { ShardedOptimizer<ThreadBackend, Sgd>(comm, views, Sgd{}); });
        check(difference, frozen, [](auto comm, auto& views) {
            ShardedOptimizer<ThreadBackend, Sgd, Zero1>(comm, views, Sgd{}, {.parameters = ParameterStorage::in_buckets});
        });
        check(difference, frozen, [](auto comm, auto& views) { ShardedOptimizer<ThreadBackend, Sgd, Zero2>(comm, views, Sgd{}); });
        check(difference, frozen, [](auto comm, auto& views) {
            ShardedParameters<ThreadBackend, Sgd>(comm, views, Sgd{}, Units({0, 0, 1}));
        });
    };
    for (const bool frozen : {false, true}) {
        check_all({"values of bf16", narrow}, frozen);
        check_all({"'p1' f32 [19]",
                   [](ParameterView& p) {
                       p.shape = {19};
                       --p.value.count;
                       --p.gradient.count;
                   }},
                  frozen);
        check_all({frozen ? "f32 [20], frozen" : "[20], frozen", [&](ParameterView& p) { p.requires_grad = frozen; }}, frozen);
    }
    check_all({"'p1' bf16 [20], frozen",
               [](ParameterView& p) {
                   p.value.dtype = DType::bf16;
                   p.gradient.dtype = DType::bf16;
               }},
              true);
}

namespace {

/// Matrices in bf16 and norms in f32, of which each rank has gradients in f32, or in the type of their values.
struct MixedModel {
    std::vector<Tensor> values;
    std::vector<std::vector<float>> gradients;
    std::vector<ParameterView> views;

    explicit MixedModel(bool f32_gradients) {
        for (const std::size_t count : {600u, 16u, 3000u, 16u, 0u, 5u, 1025u, 1u}) {
            const std::size_t i = values.size();
            Tensor& p =
                values.emplace_back("p" + std::to_string(i), i % 2 == 0 ? DType::bf16 : DType::f32, std::vector{std::size_t{count}});
            p.value = random_gradient(p, 77, 0, i);
            gradients.emplace_back(count);
        }
        for (std::size_t i = 0; i < values.size(); ++i) {
            views.push_back(parameter_view(values[i]));
            if (f32_gradients) views[i].gradient = buffer(gradients[i]);
        }
    }
};

/// The weights after some steps of what `make(backend, views)` returns a pointer to; `norms` are those of all steps.
template <class Make>
std::vector<Bytes> mixed_weights(int size, bool f32_gradients, Make&& make, std::vector<double>& norms) {
    std::vector<Bytes> result;
    norms.clear();
    run_threads(
        size,
        [&](ThreadBackend comm) {
            MixedModel model(f32_gradients);
            const auto sharded = make(comm, model.views);
            sharded->broadcast_parameters();
            for (int s = 0; s < 4; ++s) {
                sharded_backward(*sharded, s);
                sharded->finish();
                const double norm = sharded->gradient_norm();
                if (comm.rank() == 0) norms.push_back(norm);
                sharded->step(gradsync::clip_factor(norm, 1.5));
            }
            const auto mine = weights(*sharded);
            if (comm.rank() == 0) result = mine;
        },
        patient);
    return result;
}

}  // namespace

TEST_CASE("bf16 matrices and f32 norms with f32 gradients share buckets and units as far as they can, and train to the same bits") {
    for (const int size : rank_counts(1, 3)) {
        CAPTURE(size);
        std::vector<double> expected_norms, norms;
        const auto optimizer = [](auto stage, auto buckets, ParameterStorage storage, const ReducerOptions& options = {}) {
            return [=](ThreadBackend comm, const std::vector<ParameterView>& views) {
                return std::make_unique<ShardedOptimizer<ThreadBackend, AdamW, decltype(stage), decltype(buckets)>>(
                    comm, views, AdamW{}, ShardingOptions{.reducer = options, .parameters = storage}, buckets);
            };
        };
        const auto expected = mixed_weights(size, true, optimizer(Zero1{}, PerParameter{}, ParameterStorage::borrowed), expected_norms);
        const auto check = [&](auto&& make, const std::string& what) {
            CAPTURE(what);
            CHECK(first_difference(expected, mixed_weights(size, true, make, norms)) == "");
            CHECK(norms == expected_norms);
        };
        const auto check_optimizers = [&](auto stage, ParameterStorage storage) {
            CAPTURE(static_cast<int>(storage));
            check(optimizer(stage, PerParameter{}, storage), "PerParameter");
            check(optimizer(stage, SizeCappedBuckets{}, storage), "the default");
            check(optimizer(stage, SizeCappedBuckets(3000), storage), "small buckets");
            check(optimizer(stage, Flat{}, storage), "Flat");
        };
        for (const ParameterStorage storage : {ParameterStorage::borrowed, ParameterStorage::in_buckets}) {
            check_optimizers(Zero1{}, storage);
            check_optimizers(Zero2{}, storage);
        }
        const auto parameters = [](const Units& units, ShardedParametersOptions options) {
            return [=](ThreadBackend comm, const std::vector<ParameterView>& views) {
                return std::make_unique<ShardedParameters<ThreadBackend, AdamW>>(comm, views, AdamW{}, units, options);
            };
        };
        check(parameters(Units({0, 1, 2, 3, 4, 5, 6, 7}), {}), "a unit for each parameter");
        for (const bool shards : {true, false}) {
            check(parameters(Units({0, 0, 0, 0, 1, 1, 2, 2}), {.shard_gradients = shards}), "units of both types");
            check(parameters(Units({0, 0, 0, 0, 1, 1, 2, 2}), {.shard_gradients = shards, .reshard_after_forward = false}),
                  "units that stay");
            check(parameters(Units(std::vector<std::size_t>(8)), {.shard_gradients = shards, .replicate_below = 100}), "one unit of all");
        }
    }
}

TEST_CASE("bf16 matrices and f32 norms whose gradients travel in f32 share buckets as far as they can, and train to the same bits") {
    for (const int size : rank_counts(1, 3)) {
        CAPTURE(size);
        std::vector<double> expected_norms, norms;
        const auto optimizer = [](auto buckets, ParameterStorage storage) {
            return [=](ThreadBackend comm, const std::vector<ParameterView>& views) {
                return std::make_unique<ShardedOptimizer<ThreadBackend, AdamW, Zero1, decltype(buckets)>>(
                    comm, views, AdamW{}, ShardingOptions{.reducer = {.reduce_dtype = DType::f32}, .parameters = storage}, buckets);
            };
        };
        const auto expected = mixed_weights(size, false, optimizer(PerParameter{}, ParameterStorage::borrowed), expected_norms);
        for (const ParameterStorage storage : {ParameterStorage::borrowed, ParameterStorage::in_buckets}) {
            const auto check = [&](auto buckets) {
                CAPTURE(buckets.describe());
                CHECK(first_difference(expected, mixed_weights(size, false, optimizer(buckets, storage), norms)) == "");
                CHECK(norms == expected_norms);
            };
            check(PerParameter{});
            check(SizeCappedBuckets{});
            check(SizeCappedBuckets(3000));
            check(Flat{});
        }
    }
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

namespace {

/// The outcome of a step on two ranks whose weights differ, with no broadcast. If it `publishes`, all ranks get those of the shards' owners.
template <class Make>
void check_without_broadcast(std::size_t every, bool publishes, Make&& make) {
    const auto seen = outcomes(2, [&](ThreadBackend comm) {
        auto model = initial_tensors({30, 40}, DType::f32);
        write(model[1].value_view(), constant_bytes(DType::f32, 40, comm.rank()));
        auto sharded = make(comm, model, ReducerOptions{.compare_weights_every = every});
        if (publishes) sharded->publish();
        for (std::size_t i = 2; i-- > 0;) {
            write(sharded->acquire_gradient(i), constant_bytes(DType::f32, model[i].count(), 0));
            sharded->mark_ready(i);
        }
        sharded->finish();
        sharded->step();
    });
    const bool expected = every != never && !publishes;
    for (const Outcome& outcome : seen) {
        INFO(outcome.text);
        CHECK(outcome.is(Errc::parameter_mismatch) == expected);
        CHECK(outcome.says("call broadcast_parameters() before the first step") == expected);
        CHECK(outcome.text.empty() == !expected);
    }
}

}  // namespace

TEST_CASE("weights that live with the library, and that differ between ranks, are found in the first finish()") {
    using InBuckets = ShardedOptimizer<ThreadBackend, Sgd>;
    using Parts = ShardedParameters<ThreadBackend, Sgd>;
    for (const auto& [every, publishes] : {std::pair(std::size_t{0}, false), std::pair(never, false), std::pair(std::size_t{0}, true)}) {
        check_without_broadcast(every, publishes, [](ThreadBackend comm, auto& model, const ReducerOptions& options) {
            return std::make_unique<InBuckets>(comm, model, Sgd{},
                                               ShardingOptions{.reducer = options, .parameters = ParameterStorage::in_buckets});
        });
        check_without_broadcast(every, publishes, [](ThreadBackend comm, auto& model, const ReducerOptions& options) {
            return std::make_unique<ShardedOptimizer<ThreadBackend, Sgd, StepInBackward>>(
                comm, model, Sgd{}, ShardingOptions{.reducer = options, .parameters = ParameterStorage::in_buckets});
        });
        check_without_broadcast(every, publishes, [](ThreadBackend comm, auto& model, const ReducerOptions& options) {
            return std::make_unique<Parts>(comm, model, Sgd{}, Units({0, 1}), ShardedParametersOptions{.reducer = options});
        });
    }
}

TEST_CASE("ranks with equal weights need no broadcast, even if one has no batch or leaves a gradient unused in the first step") {
    for (const bool finds_unused : {false, true})
        for (const bool stage3 : {false, true})
            CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
                      auto model = initial_tensors({30, 40, 50}, DType::f32);
                      model[2].requires_grad = false;  // its memory is filled later
                      write(model[2].value_view(), constant_bytes(DType::f32, 50, comm.rank()));
                      const ReducerOptions options{.unused = finds_unused ? UnusedParameters::find_unused : UnusedParameters::error};
                      const bool is_second = comm.rank() == 1;
                      const auto step = [&](auto&& sharded) {
                          write(model[2].value_view(), constant_bytes(DType::f32, 50, 3));
                          if (!finds_unused) (void)sharded.begin_step(!is_second);
                          for (std::size_t i = 2; i-- > (finds_unused && is_second ? 1u : 0u);) {
                              if (!finds_unused && is_second) break;
                              write(sharded.acquire_gradient(i), constant_bytes(DType::f32, model[i].count(), 1));
                              sharded.mark_ready(i);
                          }
                          sharded.finish();
                          sharded.step();
                          finding.check(sharded.statistics().steps == 1, "no step");
                      };
                      if (stage3)
                          step(ShardedParameters(comm, model, Sgd{}, Units({0, 1, 1}), ShardedParametersOptions{.reducer = options}));
                      else
                          step(ShardedOptimizer<ThreadBackend, Sgd>(
                              comm, model, Sgd{}, ShardingOptions{.reducer = options, .parameters = ParameterStorage::in_buckets}));
                  }) == "");
}

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

TEST_CASE("stages 1 and 2: V micro-batches give the same weights on every number of ranks") {
    const std::vector<std::size_t> counts{300, 5, 2000};
    const auto trained = [&](std::size_t all, int ranks, bool sharded_gradients, Averaging averaging) {
        const ReducerOptions options{.accumulation = Accumulation::in_buckets, .micro_batches = all};
        std::vector<Bytes> result;
        run_threads(ranks, [&](ThreadBackend comm) {
            auto model = initial_tensors(counts, DType::f32);
            ReducerOptions own = options;
            own.averaging = averaging;
            const auto run = [&]<class Stage>(Stage) {
                ShardedOptimizer<ThreadBackend, AdamW, Stage, SizeCappedBuckets, OverlapBackward> sharded(
                    comm, model, AdamW{}, {.reducer = own}, SizeCappedBuckets(3000));
                const Deal deal{all, ranks, sharded_gradients};
                const std::size_t each = deal.count(comm.rank());
                for (int step = 0; step < 3; ++step) {
                    const auto backward = [&](std::size_t number) {
                        for (std::size_t i = model.size(); i-- > 0;) {
                            write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), static_cast<int>(number), step, i);
                            sharded.mark_ready(i);
                        }
                    };
                    for (std::size_t k = 0; k < (sharded_gradients ? deal.rounds() : each); ++k) {
                        std::optional<NoSync> guard;
                        if constexpr (!Stage::shards_gradients)
                            if (k + 1 < each) guard.emplace(sharded.no_sync());
                        if (sharded_gradients && k >= deal.count(ranks - 1)) (void)sharded.begin_step(k < each);
                        if (k < each) backward(deal.number(comm.rank(), k));
                        if (Stage::shards_gradients || k + 1 == each) sharded.finish();
                    }
                    sharded.step(clip_factor(sharded.gradient_norm(), 0.5));
                }
                sharded.flush();
                if (comm.rank() == ranks - 1)
                    for (std::size_t i = 0; i < model.size(); ++i) result.push_back(bytes_of(sharded.parameter_value(i)));
            };
            if (sharded_gradients) run(Zero2{});
            else run(Zero1{});
        });
        return result;
    };
    for (const Averaging averaging : {Averaging::mean, Averaging::sum})
        for (const std::size_t all : {5u, 8u, 12u, 14u}) {
            const auto expected = trained(all, 1, false, averaging);
            for (int ranks = 1; ranks <= std::min<int>(8, static_cast<int>(all)); ++ranks) {
                CAPTURE(all);
                CAPTURE(ranks);
                CHECK(trained(all, ranks, true, averaging) == expected);
                CHECK(trained(all, ranks, false, averaging) == expected);
            }
        }
}

TEST_CASE("after a step that failed because of another rank, marks say why, too") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors({30}, DType::f32);
              ShardedOptimizer sharded(comm, model, Sgd{});
              write(sharded.acquire_gradient(0), random_gradient(model[0], comm.rank(), 0, 0));
              sharded.mark_ready(0);
              sharded.finish();
              if (comm.rank() == 1) return comm.fail("its disk is full");
              while (!comm.failed()) std::this_thread::yield();
              finding.check(outcome_of([&] { sharded.step(); }).says("its disk is full"), "step() does not say it");
              const Outcome marked = outcome_of([&] { sharded.mark_ready(0); });
              finding.check(marked.is(Errc::peer_failed) && marked.says("its disk is full"), marked.text);
          }) == "");
}

TEST_CASE("stage 2 with micro_batches: a mean that a type of low precision holds does not overflow in a sum") {
    for (const int ranks : rank_counts())
        for (const auto& [dtype, reduce_dtype, value] :
             {std::tuple{DType::f16, OptionalDType(), 60000.0}, std::tuple{DType::f32, OptionalDType(DType::f16), -60000.0},
              std::tuple{DType::f8e4m3, OptionalDType(), 416.0}})
            CHECK(findings(ranks, [&, dtype = dtype, reduce_dtype = reduce_dtype, value = value](ThreadBackend comm, Finding& finding) {
                      auto model = initial_tensors({10, 7}, dtype);
                      const std::size_t all = 2 * static_cast<std::size_t>(ranks) + 1;
                      ReducerOptions options{.accumulation = Accumulation::in_buckets, .micro_batches = all};
                      options.reduce_dtype = reduce_dtype;
                      ShardedOptimizer sharded(comm, model, Sgd{}, ShardingOptions{.reducer = options}, Zero2{}, PerParameter{});
                      const Deal deal{all, ranks, true};
                      for (std::size_t k = 0; k < deal.rounds(); ++k) {
                          const bool has_batch = k < deal.count(comm.rank());
                          if (k >= deal.count(ranks - 1)) (void)sharded.begin_step(has_batch);
                          for (std::size_t i = 2; has_batch && i-- > 0;) {
                              const BufferView gradient = sharded.acquire_gradient(i);
                              with_type(dtype, [&]<class T>(T*) {
                                  write(gradient, bytes_of(const_buffer(std::vector<T>(gradient.count, element_of<T>(value)))));
                              });
                              sharded.mark_ready(i);
                          }
                          sharded.finish();
                      }

                      sharded.for_each_gradient([&](const auto& slice) {
                          for (const double g : slice.gradient)
                              finding.check(std::abs(g - value) <= 0.07 * std::abs(value), std::to_string(g));
                      });
                      sharded.step();
                  }) == "");
}

TEST_CASE("stage 2 with micro_batches: steps that come too early, and what comes too late, are refused") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors({30}, DType::f32);
              ShardedOptimizer<ThreadBackend, Sgd, Zero2> sharded(
                  comm, model, Sgd{}, {.reducer = {.accumulation = Accumulation::in_buckets, .micro_batches = 4}});
              const auto micro_batch = [&] {
                  write_gradient(sharded.acquire_gradient(0), sharded.parameter_value(0), comm.rank(), 0, 0);
                  sharded.mark_ready(0);
                  sharded.finish();
              };
              const auto refused = [&](const char* what, auto&& call) {
                  const Outcome outcome = outcome_of(call);
                  finding.check(outcome.says(what), std::string(what) + ": " + outcome.text);
              };
              refused("every rank needs a batch", [&] { (void)sharded.begin_step(false); });
              micro_batch();
              refused("only 1 of this step's 2 micro-batches were averaged", [&] { sharded.step(); });
              refused("only 1 of this step's 2 micro-batches were averaged", [&] { (void)sharded.gradient_norm(); });
              micro_batch();
              refused("all 2 micro-batches of this step were averaged", [&] { sharded.finish(); });
              sharded.step();
          }) == "");
    const auto refused = outcome_of([] {
        run_threads(1, [](ThreadBackend comm) {
            auto model = initial_tensors({30}, DType::f32);
            const ShardedOptimizer<ThreadBackend, Sgd, Zero2> sharded(
                comm, model, Sgd{},
                {.reducer = {.averaging = Averaging::mean_over_count, .accumulation = Accumulation::in_buckets, .micro_batches = 4}});
        });
    });
    CHECK(refused.says("Averaging::mean and sum only"));
}

namespace {

/// Notes the gradients that it is given.
struct Recorder {
    std::size_t state_count() const { return 1; }
    void begin_step() {}
    void step(const OptimizerSlice<float>& s) const {
        for (const float g : s.gradient) seen->push_back(g * static_cast<float>(s.gradient_scale));
        for (float& m : std::span(s.state[0], s.value.size())) m = static_cast<float>(s.parameter);
    }
    std::vector<float>* seen;
};

}  // namespace

TEST_CASE("an optimizer that stands outside sees the gradients of a step, and all ranks can have all state") {
    const auto check = [](auto stage, DType dtype) {
        for (const int size : rank_counts()) {
            CAPTURE(size);
            CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                      auto model = initial_tensors(awkward_sizes, dtype);
                      std::vector<float> stepped, seen;
                      ShardedOptimizer sharded(comm, model, Recorder{&stepped}, stage, SizeCappedBuckets(4096));
                      const auto look = [&] {
                          seen.clear();
                          sharded.for_each_gradient([&](const auto& s) {
                              for (const auto g : s.gradient) seen.push_back(static_cast<float>(g) * static_cast<float>(s.gradient_scale));
                          });
                      };
                      finding.check(outcome_of(look).says("call finish() first"), "gradients before finish()");
                      for (int m = 0; m < (stage.shards_gradients ? 2 : 1); ++m) {
                          for (std::size_t i = model.size(); i-- > 0;) {
                              write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), m, i);
                              sharded.mark_ready(i);
                          }
                          sharded.finish();
                      }
                      look();
                      sharded.step();
                      for (auto* gradients : {&seen, &stepped}) std::sort(gradients->begin(), gradients->end());  // buckets in any order
                      finding.check(seen == stepped && !(size == 1 && seen.empty()), "the gradients differ");

                      const auto into = [](std::vector<Bytes>& all) {
                          return [&](std::size_t i, std::size_t a, std::size_t first, ConstBufferView piece) {
                              all.push_back(bytes_of(piece));
                              all.push_back({std::byte(i), std::byte(a), std::byte(first)});
                          };
                      };
                      std::vector<Bytes> everywhere, at_root;
                      sharded.collect_everywhere(into(everywhere));
                      sharded.collect_state(size - 1, into(at_root));
                      finding.check(!everywhere.empty() && (comm.rank() != size - 1 || everywhere == at_root), "the state differs");
                  }) == "");
        }
    };
    check(Zero1{}, DType::f32);
    check(Zero1{}, DType::bf16);
    check(Zero2{}, DType::bf16);
}

TEST_CASE("state is collected and distributed in the order of registration, whatever the plan") {
    using Piece = std::tuple<std::size_t, std::size_t, std::size_t>;
    const std::vector<std::size_t> sizes = {700, 300000, 0, 5, 1025};
    for (const int size : rank_counts()) {
        CAPTURE(size);
        CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                  std::vector<Piece> expected;
                  for (const std::size_t i : {0u, 1u, 3u, 4u})
                      for (std::size_t a = 0; a < 2; ++a)
                          for (std::size_t first = 0; first < sizes[i]; first += std::size_t{1} << 18) expected.push_back({i, a, first});
                  const auto model = initial_tensors(sizes, DType::bf16);
                  auto own = model;
                  ShardedOptimizer<ThreadBackend, Sgd, Zero1> sharded(comm, own, Sgd{}, {}, SizeCappedBuckets(4096));
                  const auto check = [&](auto&& object, const std::string& when) {
                      std::vector<Piece> collected, everywhere, distributed;
                      std::vector<Bytes> state;
                      object.collect_state(0, [&](std::size_t i, std::size_t a, std::size_t first, ConstBufferView piece) {
                          collected.push_back({i, a, first});
                          state.push_back(bytes_of(piece));
                      });
                      object.collect_everywhere([&](std::size_t i, std::size_t a, std::size_t first, ConstBufferView) {
                          everywhere.push_back({i, a, first});
                      });
                      const auto before = weights(object);
                      object.distribute_state(0, [&](std::size_t i, std::size_t a, std::size_t first, BufferView piece) {
                          write(piece, state[distributed.size()]);
                          distributed.push_back({i, a, first});
                      });
                      finding.check(everywhere == expected, "another order on all ranks " + when);
                      finding.check(comm.rank() != 0 || (collected == expected && distributed == expected), "another order " + when);
                      finding.check(first_difference(before, weights(object)).empty(), "other weights " + when);
                  };
                  check(sharded, "at first");
                  for (const std::size_t i : {3u, 0u, 2u, 4u, 1u}) {
                      write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), 0, i);
                      sharded.mark_ready(i);
                  }
                  sharded.finish();
                  sharded.step();
                  finding.check(sharded.rebuild_buckets(), "the plan has not changed");
                  check(sharded, "after planning anew");
                  auto parts = model;
                  check(ShardedParameters<ThreadBackend, Sgd>(comm, parts, Sgd{}, Units({0, 0, 1, 2, 1})), "in stage 3");
              }) == "");
    }
}
