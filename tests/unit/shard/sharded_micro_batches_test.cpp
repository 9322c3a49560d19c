// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include "sharded_training.hpp"

using namespace gradsync;
using namespace gradsync_test;

TEST_CASE("micro-batches: stage 1 adds them up as a whole trainer does, stage 2 over the ranks first") {
    Training t{.micro_batches = 3};
    using enum ParameterStorage;
    for (const int size : rank_counts(1, 3)) CHECK(difference_of_stage<Zero1, SizeCappedBuckets, OverlapBackward>(size, t, borrowed) == "");
    // Sgd, as Adam's division makes any difference of a tiny gradient a large one.
    const auto expected = weights_of_whole(3, t, Sgd{});
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors(t.counts, t.dtype);
              ShardedOptimizer<ThreadBackend, Sgd, Zero2> sharded(comm, model, Sgd{});
              train_sharded(sharded, t);
              for (std::size_t i = 0; i < model.size(); ++i) {
                  const auto a = numbers(sharded.parameter_value(i)), b = numbers({expected[i].data(), model[i].count(), DType::f32});
                  for (std::size_t k = 0; k < a.size(); ++k)
                      finding.check(std::abs(a[k] - b[k]) <= 1e-6 * (1 + std::abs(b[k])), "too far off");
              }
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

TEST_CASE("stage 2 with micro_batches: a batch that belongs to another rank is refused") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors({30}, DType::f32);
              ShardedOptimizer<ThreadBackend, Sgd, Zero2> sharded(
                  comm, model, Sgd{}, {.reducer = {.accumulation = Accumulation::in_buckets, .micro_batches = 3}});
              const auto mark = [&] {
                  write_gradient(sharded.acquire_gradient(0), sharded.parameter_value(0), comm.rank(), 0, 0);
                  sharded.mark_ready(0);
              };
              mark();
              sharded.finish();
              if (comm.rank() == 1)
                  for (const auto& call : {std::function<void()>(mark), std::function<void()>([&] { sharded.finish(); })}) {
                      const Outcome outcome = outcome_of(call);
                      finding.check(outcome.says("this rank has had all of its 1 micro-batches; call begin_step(false)"), outcome.text);
                  }
              (void)sharded.begin_step(comm.rank() == 0);
              if (comm.rank() == 0) mark();
              sharded.finish();
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
              refused("only 1 of this step's 2 micro-batches were averaged", [&] { sharded.for_each_gradient([](const auto&) {}); });
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

TEST_CASE("stage 2: averages are not shown while gradients of the next micro-batch are marked") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors({30, 20}, DType::f32);
              ShardedOptimizer<ThreadBackend, Sgd, Zero2, PerParameter> sharded(comm, model, Sgd{});
              const auto mark = [&](std::size_t i) {
                  write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), 0, i);
                  sharded.mark_ready(i);
              };
              for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
                  mark(1);
                  if (micro_batch == 1) {
                      const Outcome outcome = outcome_of([&] { sharded.for_each_gradient([](const auto&) {}); });
                      finding.check(outcome.says("some gradients of this step are marked"), outcome.text);
                  }
                  mark(0);
                  sharded.finish();
                  sharded.for_each_gradient([](const auto&) {});
              }
              sharded.step();
          }) == "");
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
