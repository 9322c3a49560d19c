// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include "sharded_training.hpp"

using namespace gradsync;
using namespace gradsync_test;

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

}  // namespace

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
                          refused(2, "'p2' is not of a floating type");
                          if (storage == ParameterStorage::borrowed) refused(3, "the values of 'p0' and 'p3' share memory");
                          write(sharded.acquire_gradient(0), random_gradient(model[0], comm.rank(), s, 0));
                          sharded.mark_ready(0);
                          sharded.finish();
                          sharded.step();
                      }
                  }) == "");
}

TEST_CASE("an integer parameter is not unfrozen even where integers could be summed, and the training goes on") {
    for (const int size : rank_counts(1, 3))
        CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                  auto model = initial_tensors({30, 50, 50}, DType::f32);
                  std::vector<ParameterView> views = views_of(model);
                  std::vector<std::int32_t> counts(50), others(50), sums(50);
                  for (const std::size_t i : {1u, 2u}) views[i].requires_grad = false;
                  views[1].gradient = buffer(sums), views[1].value = buffer(counts);
                  views[2].value = buffer(others);
                  ShardedOptimizer sharded(comm, views, Sgd{}, ShardingOptions{.reducer = {.averaging = Averaging::sum}});
                  for (int s = 0; s < 2; ++s) {
                      const BucketPlan before = sharded.plan();
                      for (const std::size_t i : {1u, 2u}) {
                          const std::size_t which[] = {i};
                          const std::string name = "p" + std::to_string(i);
                          check_refused(
                              finding, [&] { sharded.unfreeze(which); }, "'" + name + "' is not of a floating type", name);
                      }
                      finding.check(sharded.plan() == before && !sharded.parameters()[1].requires_grad,
                                    "what was refused has changed something");
                      write(sharded.acquire_gradient(0), random_gradient(model[0], comm.rank(), s, 0));
                      sharded.mark_ready(0);
                      sharded.finish();
                      sharded.step();
                  }
              }) == "");
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
