// SPDX-License-Identifier: BSL-1.0
// Micro-batches: no_sync(), and who adds up what in which precision.
#include <doctest/doctest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/overlap/overlap_forward.hpp>

#include "support/averaging_oracle.hpp"
#include "support/bare_engine.hpp"
#include "support/ranks.hpp"
#include "support/slow_build.hpp"
#include "support/tensor.hpp"
#include "support/tiny_network.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// This rank's samples: every size-th.
std::vector<Sample> shard(const std::vector<Sample>& all, int rank, int size) {
    std::vector<Sample> own;
    for (std::size_t k = static_cast<std::size_t>(rank); k < all.size(); k += static_cast<std::size_t>(size)) own.push_back(all[k]);
    return own;
}

/// Who adds up the micro-batches, and where: the trainer in its own memory, the Reducer, the trainer in the buckets.
const std::vector<ReducerOptions> ways_to_accumulate{
    {}, {.accumulation = Accumulation::in_buckets}, {.gradients = GradientStorage::in_buckets}};

/// Gradient i of a micro-batch is computed: `adds` it to what is there, or overwrites that.
template <class Sync>
void write_micro_batch(Sync& sync, const Tensor& t, int rank, int batch, std::size_t i, bool adds) {
    const Bytes own = random_gradient(t, rank, batch, i);
    write(sync.gradient_view(i), adds ? sum_of(t.dtype, {bytes_of(sync.gradient_view(i)), own}) : own);
}

/// The mean over all ranks and micro-batches.
Bytes mean_of_all(const Tensor& t, int ranks, const std::vector<int>& batches, std::size_t i) {
    std::vector<Bytes> terms;
    for (int r = 0; r < ranks; ++r)
        for (const int batch : batches) terms.push_back(random_gradient(t, r, batch, i));
    return mean_of(t.dtype, terms);
}

/// The mean over the ranks of what each has summed up over these micro-batches.
Bytes mean_of_sums(const Tensor& t, int ranks, const std::vector<int>& batches, std::size_t i) {
    std::vector<Bytes> sums;
    for (int r = 0; r < ranks; ++r) {
        std::vector<Bytes> terms;
        for (const int batch : batches) terms.push_back(random_gradient(t, r, batch, i));
        sums.push_back(sum_of(t.dtype, terms));
    }
    return mean_of(t.dtype, sums);
}

}  // namespace

TEST_CASE("PyTorch parity: three Adam steps equal local training on the joined batch") {
    const auto data = samples(24);
    TinyNetwork local;
    for (int step = 0; step < 3; ++step) {
        local.backward(data, [](std::size_t) {});
        local.adam();
    }
    REQUIRE(local.loss(data) < TinyNetwork().loss(data));
    for (const int ranks : rank_counts())
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      TinyNetwork model(comm.rank() == 0 ? 1 : 99);  // the others get rank 0's weights
                      const auto own = shard(data, comm.rank(), ranks);
                      Reducer<ThreadBackend, SizeCappedBuckets, OverlapBackward> sync(comm, model.parameters(), {.gradients = storage},
                                                                                      SizeCappedBuckets(60));
                      sync.broadcast_parameters();
                      for (int step = 0; step < 3; ++step) {
                          model.backward(
                              own, true, false, [&](std::size_t i) { return sync.gradient_view(i).as<float>(); },
                              [&](std::size_t i) { sync.mark_ready(i); });
                          sync.finish();
                          model.adam([&](std::size_t i) { return std::span<const float>(sync.gradient_view(i).as<float>()); });
                      }
                      finding.check(close(model.values(), local.values()), "the weights differ from local training");
                  }) == "");
        }
}

TEST_CASE("PyTorch parity: no_sync accumulation equals local, gradients copied and as bucket views") {
    const auto data = samples(36);
    constexpr int micro_batches = 3;
    for (const int ranks : rank_counts())
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
            TinyNetwork local;
            for (int step = 0; step < 3; ++step) {
                local.backward(data, [](std::size_t) {});
                local.adam();
            }
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      TinyNetwork model;
                      const auto own = shard(data, comm.rank(), ranks);
                      const std::size_t each = own.size() / micro_batches;
                      Reducer<ThreadBackend, SizeCappedBuckets> sync(comm, model.parameters(), {.gradients = storage},
                                                                     SizeCappedBuckets(60));
                      const auto micro_batch = [&](int m) {
                          model.backward(
                              std::span(own).subspan(static_cast<std::size_t>(m) * each, each), true, m != 0,
                              [&](std::size_t i) { return sync.gradient_view(i).as<float>(); }, [&](std::size_t i) { sync.mark_ready(i); });
                      };
                      for (int step = 0; step < 3; ++step) {
                          {
                              const auto guard = sync.no_sync();
                              for (int m = 0; m + 1 < micro_batches; ++m) micro_batch(m);
                          }
                          micro_batch(micro_batches - 1);
                          sync.finish();
                          // The sum over micro-batches, averaged over ranks: the trainer divides by their number.
                          std::vector<std::vector<float>> scaled;
                          for (std::size_t i = 0; i < model.size(); ++i) {
                              scaled.emplace_back(sync.gradient_view(i).as<float>().begin(), sync.gradient_view(i).as<float>().end());
                              for (float& x : scaled.back()) x /= micro_batches;
                          }
                          model.adam([&](std::size_t i) { return std::span<const float>(scaled[i]); });
                      }
                      finding.check(close(model.values(), local.values()), "the weights differ from local training");
                  }) == "");
        }
}

TEST_CASE("Accumulation::in_buckets adds up in f32, and rounds once") {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32, DType::f64, DType::f8e5m2})
        for (const int ranks : rank_counts(1, 3)) {
            CAPTURE(ranks);
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({50, 3, 700}, dtype);
                      const int rank = comm.rank();
                      Reducer<ThreadBackend, SizeCappedBuckets> sync(
                          comm, model, {.accumulation = Accumulation::in_buckets, .micro_batches = std::size_t(4 * ranks)},
                          SizeCappedBuckets(300));
                      for (int step = 0; step < 2; ++step) {
                          constexpr int micro_batches = 4;
                          for (int m = 0; m < micro_batches; ++m) {
                              const int batch = step * 10 + m;
                              if (m + 1 == micro_batches) {
                                  backward(sync, model, rank, batch);
                                  break;
                              }
                              const auto guard = sync.no_sync();
                              backward(sync, model, rank, batch);
                          }
                          sync.finish();
                          for (std::size_t i = 0; i < model.size(); ++i) {
                              // In f32 (f64): the mean over the micro-batches of all ranks.
                              const DType wide = accumulator_of(dtype);
                              std::vector<Bytes> terms;
                              for (int r = 0; r < ranks; ++r)
                                  for (int m = 0; m < micro_batches; ++m) {
                                      const Bytes narrow = random_gradient(model[i], r, step * 10 + m, i);
                                      Bytes widened(model[i].count() * size_of(wide));
                                      kernel::convert(narrow.data(), dtype, widened.data(), wide, model[i].count());
                                      terms.push_back(widened);
                                  }
                              const Bytes mean = mean_of(wide, terms);
                              Bytes expected(model[i].gradient.size());
                              kernel::convert(mean.data(), wide, expected.data(), dtype, model[i].count());
                              finding.check(model[i].gradient == expected,
                                            "parameter " + std::to_string(i) + ", step " + std::to_string(step));
                          }
                      }
                  }) == "");
        }
}

TEST_CASE("N ranks with one micro-batch each give the bits of one rank with N micro-batches") {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64, DType::f8e4m3})
        for (const int ranks : rank_counts(2)) {
            const auto shape = tensors({50, 3, 700}, dtype);
            const ReducerOptions options{.averaging = Averaging::mean_over_count,
                                         .accumulation = Accumulation::in_buckets,
                                         .micro_batches = static_cast<std::size_t>(ranks)};
            std::vector<Bytes> alone, together;
            run_threads(1, [&](ThreadBackend comm) {
                auto model = shape;
                Reducer sync(comm, model, options);
                sync.set_weight(ranks);
                {
                    const auto guard = sync.no_sync();
                    for (int m = 0; m + 1 < ranks; ++m) backward(sync, model, m, 7);
                }
                backward(sync, model, ranks - 1, 7);
                sync.finish();
                for (const Tensor& t : model) alone.push_back(t.gradient);
            });
            run_threads(ranks, [&](ThreadBackend comm) {
                auto model = shape;
                const int rank = comm.rank();
                Reducer sync(comm, model, options);
                sync.set_weight(1);
                backward(sync, model, rank, 7);
                sync.finish();
                if (rank == 0)
                    for (const Tensor& t : model) together.push_back(t.gradient);
            });
            CAPTURE(ranks);
            CHECK(alone == together);
        }
}

namespace {

/// The gradients that V micro-batches give on `ranks` ranks. `uses(v, i)`: does micro-batch v use parameter i?
template <class Overlap = OverlapBackward, class Buckets, class Uses>
std::vector<Bytes> trained(int ranks, const std::vector<Tensor>& shape, ReducerOptions options, const Buckets& buckets, Uses&& uses) {
    std::vector<Bytes> result;
    const Deal deal{options.micro_batches, ranks};
    run_threads(ranks, [&](ThreadBackend comm) {
        auto model = shape;
        Reducer<ThreadBackend, Buckets, Overlap> sync(comm, model, options, buckets);
        const std::size_t each = deal.count(comm.rank());
        for (int step = 0; step < 2; ++step) {
            if (options.averaging == Averaging::mean_over_count) sync.set_weight(0.5 * static_cast<double>(each));
            const auto micro_batch = [&](std::size_t m) {
                const int v = static_cast<int>(deal.number(comm.rank(), m));
                for (std::size_t i = model.size(); i-- > 0;) {
                    if (!uses(v, i)) continue;
                    write(sync.gradient_view(i), random_gradient(model[i], v, step, i));
                    sync.mark_ready(i);
                }
            };
            for (std::size_t m = 0; m + 1 < each; ++m) {
                const auto guard = sync.no_sync();
                micro_batch(m);
            }
            micro_batch(each - 1);
            if constexpr (std::is_same_v<Overlap, OverlapForward>) sync.finish().wait();
            else sync.finish();
        }
        if (comm.rank() == ranks - 1)
            for (std::size_t i = 0; i < model.size(); ++i) result.push_back(bytes_of(sync.gradient_view(i)));
    });
    return result;
}

}  // namespace

TEST_CASE("V micro-batches give the bits of the tree on every number of ranks") {
    gradsync_test::Thinned cases;
    for (const DType dtype : {DType::f32, DType::bf16, DType::f64})
        for (const int all : {4, 6, 7, 8, 12, 13, 16, 23})
            for (const bool some_unused : {false, true})
                for (const Averaging averaging : {Averaging::mean, Averaging::sum, Averaging::mean_over_count}) {
                    if (!cases.next()) continue;
                    const auto shape = tensors({50, 3, 700}, dtype);
                    const auto uses = [&](int v, std::size_t i) {
                        return !some_unused || i == 2 || (v * 7 + static_cast<int>(i)) % 3 != 0;
                    };
                    std::vector<Bytes> expected;
                    for (std::size_t i = 0; i < shape.size(); ++i) {
                        std::vector<Bytes> terms;
                        std::vector<Contribution> by;
                        for (int v = 0; v < all; ++v) {
                            terms.push_back(random_gradient(shape[i], v, 1, i));
                            const bool first = v == 0;
                            by.push_back({uses(v, i) ? 1.0 : 0.0, averaging == Averaging::mean  ? 1
                                                                  : averaging == Averaging::sum ? first
                                                                                                : 0.5});
                        }
                        expected.push_back(combined(dtype, terms, by));
                    }
                    for (int ranks = 1; ranks <= std::min(all, 8); ++ranks) {
                        const bool even = all % ranks == 0 && std::has_single_bit(static_cast<unsigned>(all / ranks));
                        if (averaging == Averaging::mean_over_count && !even && ranks > 1) continue;
                        ReducerOptions options{.averaging = averaging,
                                               .accumulation = Accumulation::in_buckets,
                                               .micro_batches = static_cast<std::size_t>(all),
                                               .unused = some_unused ? UnusedParameters::find_unused : UnusedParameters::error};
                        CAPTURE(name_of(dtype));
                        CAPTURE(all);
                        CAPTURE(ranks);
                        CAPTURE(some_unused);
                        CAPTURE(static_cast<int>(averaging));
                        CHECK(trained(ranks, shape, options, SizeCappedBuckets(300), uses) == expected);
                        if (dtype == DType::bf16) options.reduce_dtype = DType::f32;
                        CHECK(trained(ranks, shape, options, Flat{}, uses) == expected);
                        options.reduce_dtype = {};
                        if (dtype == DType::bf16) continue;
                        options.gradients = GradientStorage::in_buckets;
                        CHECK(trained(ranks, shape, options, PerParameter{}, uses) == expected);
                        if (some_unused) continue;
                        CHECK(trained<OverlapForward>(ranks, shape, options, SizeCappedBuckets(300), uses) == expected);
                        CHECK(trained<NoOverlap>(ranks, shape, options, SizeCappedBuckets(300), uses) == expected);
                    }
                }
}

TEST_CASE("with several sums per rank a rebuild may give more buckets, and two Reducers may be finished in any order") {
    const Deal deal{3, 2};
    // Pairs share buckets of 100 in the order of registration, and no two fit together in the order in which they are marked.
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({60, 40, 60, 40, 60, 40, 60, 40});
              Reducer<ThreadBackend, SizeCappedBuckets> sync(comm, model, {.accumulation = Accumulation::in_buckets, .micro_batches = 3},
                                                             SizeCappedBuckets(400));
              const std::size_t buckets = sync.plan().size();
              for (int step = 0; step < 2; ++step) {
                  for (std::size_t turn = 0; turn < deal.count(comm.rank()); ++turn) {
                      std::optional<NoSync> guard;
                      if (turn + 1 < deal.count(comm.rank())) guard.emplace(sync.no_sync());
                      for (const std::size_t i : {6u, 4u, 2u, 0u, 7u, 5u, 3u, 1u}) {
                          for (float& x : sync.gradient_view(i).as<float>())
                              x = static_cast<float>(deal.number(comm.rank(), turn)) + static_cast<float>(step);
                          sync.mark_ready(i);
                      }
                  }
                  sync.finish();
                  for (std::size_t i = 0; i < model.size(); ++i)
                      for (const double x : numbers(sync.gradient_view(i))) finding.check(x == 1 + step, "a wrong mean");
                  if (step == 0) finding.check(sync.rebuild_buckets() && sync.plan().size() > buckets, "the plan has no more buckets");
              }
          }) == "");
    for (const bool tries : {false, true})
        CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
                  auto one = tensors({50}), other = tensors({50});
                  const ReducerOptions options{.accumulation = Accumulation::in_buckets, .micro_batches = 3};
                  Reducer a(comm, one, options), b(comm.duplicate(), other, options);
                  for (auto* sync : {&a, &b})
                      for (std::size_t turn = 0; turn < deal.count(comm.rank()); ++turn) {
                          std::optional<NoSync> guard;
                          if (turn + 1 < deal.count(comm.rank())) guard.emplace(sync->no_sync());
                          for (float& x : sync->gradient_view(0).as<float>()) x = static_cast<float>(deal.number(comm.rank(), turn));
                          sync->mark_ready(0);
                      }
                  for (auto* sync : {comm.rank() == 0 ? &a : &b, comm.rank() == 0 ? &b : &a}) {
                      if (tries)
                          while (!sync->try_finish()) {
                          }
                      else sync->finish();
                      for (const double x : numbers(sync->gradient_view(0))) finding.check(x == 1, "a wrong mean");
                  }
              }) == "");
}

TEST_CASE("micro_batches that are none, too many, too few, or not those of all ranks are refused by name") {
    const auto refused = [](int ranks, const ReducerOptions& options, DType dtype = DType::f32) {
        return outcome_of([&] {
            run_threads(ranks, [&](ThreadBackend comm) {
                auto model = tensors({10}, dtype);
                const Reducer sync(comm, model, options);
            });
        });
    };
    using enum Accumulation;
    CHECK(refused(2, {.micro_batches = 4}).says("set Accumulation::in_buckets, too"));
    CHECK(refused(3, {.accumulation = in_buckets, .micro_batches = 2}).says("with 2 of them, 1 of the 3 ranks would have none"));
    CHECK(refused(2, {.averaging = Averaging::mean_over_count, .accumulation = in_buckets, .micro_batches = 6})
              .says("micro_batches must be 2 times a power of two, not 6"));
    CHECK(refused(2, {.averaging = Averaging::weighted_mean, .accumulation = in_buckets, .micro_batches = 4}).says("weigh the losses"));
    CHECK(refused(2, {.gradients = GradientStorage::in_buckets, .accumulation = in_buckets, .micro_batches = 4}, DType::bf16)
              .says("let it be borrowed"));
    CHECK(refused(2, {.micro_batches = 2}).text == "");

    const auto says = [](Finding& finding, const char* what, auto&& call) {
        const Outcome outcome = outcome_of(call);
        finding.check(outcome.says(what), std::string(what) + ": " + outcome.text);
    };
    CHECK(findings(1, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              Reducer sync(comm, model, {.accumulation = Accumulation::in_buckets, .micro_batches = 3});
              backward(sync, model, 0, 1);
              says(finding, "this is micro-batch 1 of the step, and not the last of 3", [&] { sync.finish(); });
          }) == "");
    CHECK(findings(1, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              Reducer sync(comm, model, {.accumulation = Accumulation::in_buckets, .micro_batches = 3});
              for (int m = 0; m < 2; ++m) {
                  const auto guard = sync.no_sync();
                  backward(sync, model, 0, m);
              }
              says(finding, "this is the last micro-batch of a step, which has 3 on this rank", [&] { (void)sync.no_sync(); });
              backward(sync, model, 0, 2);
              sync.finish();
              const auto guard = sync.no_sync();  // several micro-batches under one guard
              for (int m = 0; m < 2; ++m) backward(sync, model, 0, m);
              says(finding, "one too many under no_sync()", [&] { backward(sync, model, 0, 2); });
          }) == "");
}

TEST_CASE("micro_batches: if a rank forgets one, no rank gets an average") {
    std::string said[2];
    run_threads(2, [&](ThreadBackend comm) {
        auto model = tensors({10, 20});
        const int rank = comm.rank();
        Reducer sync(comm, model, {.accumulation = Accumulation::in_buckets, .micro_batches = 4});
        said[rank] = outcome_of([&] {
                         if (rank == 0) {
                             const auto guard = sync.no_sync();
                             backward(sync, model, rank, 0);
                         }
                         backward(sync, model, rank, 1);
                         sync.finish();
                     }).text;
    });
    for (const std::string& text : said) {
        CAPTURE(text);
        CHECK(text.find("mark_ready on rank 1: this is micro-batch 1 of the step, and not the last of 2") != std::string::npos);
    }
}

TEST_CASE("no_sync() ends with its guard, also by an exception, and guards may be nested") {
    for (const int ranks : rank_counts(1, 3)) {
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto model = tensors({10, 20});
                  const int rank = comm.rank();
                  Reducer<ThreadBackend, PerParameter, OverlapBackward> sync(comm, model);
                  const auto marks_synchronise = [&](int batch) {
                      backward(sync, model, rank, batch);
                      sync.finish();
                      finding.check(wrong_mean(sync, model, ranks, batch).empty(), wrong_mean(sync, model, ranks, batch));
                  };
                  try {
                      const auto guard = sync.no_sync();
                      backward(sync, model, rank, 100);
                      throw std::runtime_error("a batch that cannot be read");
                  } catch (const std::runtime_error&) {
                  }
                  marks_synchronise(1);
                  {
                      const auto outer = sync.no_sync();
                      {
                          const auto inner = sync.no_sync();
                          backward(sync, model, rank, 101);
                      }
                      backward(sync, model, rank, 102);  // still within the outer one: each mark is allowed once more
                      backward(sync, model, rank, 103);
                  }
                  marks_synchronise(2);
                  { const auto unused = sync.no_sync(); }
                  marks_synchronise(3);
              }) == "");
    }
}

TEST_CASE("no_sync while buckets are in flight is refused") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              Reducer<ThreadBackend, PerParameter, OverlapBackward> sync(comm, model);
              sync.mark_ready(1);
              const Outcome outcome = outcome_of([&] { (void)sync.no_sync(); });
              finding.check(outcome.is(Errc::invalid_argument) && outcome.says("finish()"), outcome.text);
              sync.mark_ready(0);
              sync.finish();
          }) == "");
}

TEST_CASE("a gradient that only earlier micro-batches touched is averaged all the same") {
    for (const int ranks : rank_counts(1, 3))
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
            for (const UnusedParameters unused : {UnusedParameters::error, UnusedParameters::find_unused}) {
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          auto model = tensors({10, 20, 30});
                          const int rank = comm.rank();
                          Reducer<ThreadBackend, Flat> sync(comm, model, {.gradients = storage, .unused = unused});
                          {
                              const auto guard = sync.no_sync();
                              backward(sync, model, rank, 1);
                          }
                          for (const std::size_t i : {std::size_t{2}, std::size_t{0}}) {
                              write(sync.gradient_view(i), random_gradient(model[i], rank, 1, i));
                              sync.mark_ready(i);
                          }
                          sync.finish();
                          finding.check(wrong_mean(sync, model, ranks, 1).empty(), wrong_mean(sync, model, ranks, 1));
                      }) == "");
            }
}

TEST_CASE("Accumulation::in_buckets and reduce_dtype are refused but for borrowed gradients of floating types") {
    const auto refused = [](ReducerOptions options, DType dtype = DType::f32) {
        return outcome_of([&] {
            run_threads(1, [&](ThreadBackend comm) {
                auto model = tensors({3}, dtype);
                Reducer sync(comm, model, options);
            });
        });
    };
    CHECK(refused({.gradients = GradientStorage::in_buckets, .accumulation = Accumulation::in_buckets}).is(Errc::invalid_argument));
    CHECK(refused({.gradients = GradientStorage::in_buckets, .reduce_dtype = DType::f32}).is(Errc::invalid_argument));
    CHECK(refused({.reduce_dtype = DType::i32}).says("floating type"));
    CHECK(refused({.averaging = Averaging::sum, .accumulation = Accumulation::in_buckets}, DType::i32).says("'p0'"));
    for (const DType dtype : {DType::f8e4m3, DType::f8e5m2, DType::bf16}) {
        CHECK(refused({.accumulation = Accumulation::in_buckets, .reduce_dtype = dtype}).text == "");
        CHECK(refused({.reduce_dtype = dtype}).text == "");
    }
    CHECK(refused({}, DType::i64).says("Averaging::sum"));
}

TEST_CASE("a micro-batch that used a tied weight less often than the next one leaves no marks to that one") {
    for (const int ranks : rank_counts(1, 3))
        for (const ReducerOptions& way : ways_to_accumulate)
            for (const UnusedParameters unused : {UnusedParameters::find_unused, UnusedParameters::error})
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          auto model = tensors({10, 20, 700, 5});
                          model[1].uses = 2;
                          model[3].uses = 3;
                          const int rank = comm.rank();
                          ReducerOptions options = way;
                          options.unused = unused;
                          const bool adds = way.accumulation == Accumulation::in_gradients;
                          Reducer<ThreadBackend, SizeCappedBuckets> sync(comm, model, options, SizeCappedBuckets(100));
                          for (int step = 0; step < 2; ++step) {
                              const int first = 2 * step, last = 2 * step + 1;
                              {
                                  const auto guard = sync.no_sync();
                                  for (std::size_t i = model.size(); i-- > 0;) {
                                      write_micro_batch(sync, model[i], rank, first, i, false);
                                      for (std::uint32_t use = 0; use == 0 || use + 1 < model[i].uses; ++use) sync.mark_ready(i);
                                  }
                              }
                              // Tied weights are used in the first layers of the backward, long before they are complete.
                              sync.mark_ready(1);
                              sync.mark_ready(3);
                              for (const std::size_t i : {2u, 0u}) {
                                  write_micro_batch(sync, model[i], rank, last, i, adds);
                                  sync.mark_ready(i);
                              }
                              sync.mark_ready(3);
                              for (const std::size_t i : {1u, 3u}) {
                                  write_micro_batch(sync, model[i], rank, last, i, adds);
                                  sync.mark_ready(i);
                              }
                              sync.finish();
                              for (std::size_t i = 0; i < model.size(); ++i)
                                  finding.check(holds(sync.gradient_view(i), mean_of_sums(model[i], ranks, {first, last}, i)),
                                                "gradient " + std::to_string(i) + ", step " + std::to_string(step));
                          }
                      }) == "");
}

TEST_CASE("a tied weight that was used less often in every micro-batch but the last one still counts each of them once") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              model[1].uses = 2;
              const int rank = comm.rank();
              Reducer<ThreadBackend, Flat> sync(comm, model, {.accumulation = Accumulation::in_buckets, .micro_batches = 8});
              for (const int batch : {0, 1}) {
                  const auto guard = sync.no_sync();
                  for (std::size_t i = 0; i < 2; ++i) {
                      write_micro_batch(sync, model[i], rank, batch, i, false);
                      sync.mark_ready(i);
                  }
              }
              {
                  const auto outer = sync.no_sync();
                  write_micro_batch(sync, model[1], rank, 2, 1, false);
                  {
                      const auto inner = sync.no_sync();
                      sync.mark_ready(1);
                  }
                  sync.mark_ready(1);  // the end of an inner guard is not that of a micro-batch
                  write_micro_batch(sync, model[0], rank, 2, 0, false);
                  sync.mark_ready(0);
              }
              backward(sync, model, rank, 3);
              sync.finish();
              for (std::size_t i = 0; i < 2; ++i)
                  finding.check(holds(sync.gradient_view(i), mean_of_all(model[i], 2, {0, 1, 2, 3}, i)), "gradient " + std::to_string(i));
          }) == "");
}

TEST_CASE("an exception between two marks of a tied weight: what was complete counts, and the next micro-batch starts anew") {
    for (const int ranks : rank_counts(1, 3))
        for (const ReducerOptions& way : ways_to_accumulate)
            for (const bool once_more : {false, true})  // is the next one under no_sync(), too?
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          auto model = tensors({10, 20, 700});
                          model[1].uses = 2;
                          const int rank = comm.rank();
                          ReducerOptions options = way;
                          options.unused = UnusedParameters::find_unused;
                          const bool adds = way.accumulation == Accumulation::in_gradients;
                          Reducer<ThreadBackend, SizeCappedBuckets> sync(comm, model, options, SizeCappedBuckets(100));
                          try {
                              const auto guard = sync.no_sync();
                              write_micro_batch(sync, model[2], rank, 0, 2, false);
                              sync.mark_ready(2);
                              write(sync.gradient_view(1), constant_bytes(DType::f32, 20, std::numeric_limits<double>::quiet_NaN()));
                              sync.mark_ready(1);
                              throw std::runtime_error("a batch that cannot be read");
                          } catch (const std::runtime_error&) {
                          }
                          std::vector<int> batches;
                          for (int batch = once_more ? 1 : 2; batch <= 2; ++batch) {
                              std::optional<decltype(sync.no_sync())> guard;
                              if (batch == 1) guard.emplace(sync.no_sync());
                              sync.mark_ready(1);
                              for (const std::size_t i : {2u, 0u, 1u}) {  // only what was complete has something to add to
                                  write_micro_batch(sync, model[i], rank, batch, i, adds && (i == 2 || !batches.empty()));
                                  sync.mark_ready(i);
                              }
                              batches.push_back(batch);
                          }
                          sync.finish();
                          for (const std::size_t i : {0u, 1u})
                              finding.check(holds(sync.gradient_view(i), mean_of_sums(model[i], ranks, batches, i)),
                                            "gradient " + std::to_string(i));
                          batches.insert(batches.begin(), 0);
                          finding.check(holds(sync.gradient_view(2), mean_of_sums(model[2], ranks, batches, 2)), "gradient 2");
                          // Nothing of it is left for the step after.
                          for (std::size_t i = 0; i < model.size(); ++i) write(sync.gradient_view(i), Bytes(model[i].gradient.size()));
                          backward(sync, model, rank, 7);
                          sync.finish();
                          finding.check(wrong_mean(sync, model, ranks, 7).empty(), wrong_mean(sync, model, ranks, 7));
                      }) == "");
}

TEST_CASE("an exception between two marks of a tied weight may be caught within another guard") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              model[1].uses = 2;
              const int rank = comm.rank();
              Reducer<ThreadBackend, Flat> sync(comm, model, {.accumulation = Accumulation::in_buckets});
              {
                  const auto outer = sync.no_sync();
                  try {
                      const auto inner = sync.no_sync();
                      write_micro_batch(sync, model[1], rank, 100, 1, false);
                      sync.mark_ready(1);
                      throw std::runtime_error("a sample that cannot be read");
                  } catch (const std::runtime_error&) {
                  }
                  backward(sync, model, rank, 0);
              }
              backward(sync, model, rank, 1);
              sync.finish();
              for (std::size_t i = 0; i < 2; ++i)
                  finding.check(holds(sync.gradient_view(i), mean_of_sums(model[i], 2, {0, 1}, i)), "gradient " + std::to_string(i));
          }) == "");
}

TEST_CASE("discard() forgets the micro-batches before it, and only those") {
    for (const int ranks : rank_counts(1, 3))
        for (const DType dtype : {DType::f32, DType::f64, DType::bf16})
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({50, 3, 700}, dtype);
                      model[1].uses = 2;
                      const int rank = comm.rank();
                      Reducer<ThreadBackend, SizeCappedBuckets> sync(comm, model, {.accumulation = Accumulation::in_buckets},
                                                                     SizeCappedBuckets(300));
                      for (int step = 0; step < 3; ++step) {
                          {
                              const auto guard = sync.no_sync();
                              backward(sync, model, rank, 100 + step);
                              sync.mark_ready(1);  // half a micro-batch more
                          }
                          sync.discard();
                          sync.discard();  // there is nothing more to forget
                          backward(sync, model, rank, step);
                          sync.finish();
                          finding.check(wrong_mean(sync, model, ranks, step).empty(), wrong_mean(sync, model, ranks, step));
                      }
                      // A normal step of two micro-batches after a discarded one.
                      for (const int batch : {200, 10}) {
                          {
                              const auto guard = sync.no_sync();
                              backward(sync, model, rank, batch);
                          }
                          if (batch == 200) sync.discard();
                      }
                      backward(sync, model, rank, 11);
                      sync.finish();
                      if (dtype != DType::bf16)  // whose sums the oracle rounds, too
                          for (std::size_t i = 0; i < model.size(); ++i)
                              finding.check(holds(sync.gradient_view(i), mean_of_sums(model[i], ranks, {10, 11}, i)),
                                            "gradient " + std::to_string(i) + " of two micro-batches");
                  }) == "");
}

TEST_CASE("discard() forgets micro-batches that are summed beside their buckets and travel in 16 bits") {
    for (const int ranks : rank_counts(1, 3))
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto model = tensors({50, 3, 700}, DType::bf16);
                  const int rank = comm.rank();
                  Reducer<ThreadBackend, Flat> sync(comm, model, {.accumulation = Accumulation::in_buckets, .reduce_dtype = DType::bf16});
                  for (int step = 0; step < 2; ++step) {
                      {
                          const auto guard = sync.no_sync();
                          backward(sync, model, rank, 100);
                      }
                      sync.discard();
                      backward(sync, model, rank, step);
                      sync.finish();
                      finding.check(wrong_mean(sync, model, ranks, step).empty(), wrong_mean(sync, model, ranks, step));
                  }
              }) == "");
}

TEST_CASE("a parameter that only a discarded micro-batch used is unused") {
    for (const int ranks : rank_counts(1, 3))
        for (const ReducerOptions& way : ways_to_accumulate)
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({10, 20, 30});
                      const int rank = comm.rank();
                      ReducerOptions options = way;
                      options.unused = UnusedParameters::find_unused;
                      Reducer<ThreadBackend, Flat> sync(comm, model, options);
                      {
                          const auto guard = sync.no_sync();
                          backward(sync, model, rank, 100);
                      }
                      sync.discard();
                      const Bytes left = bytes_of(sync.gradient_view(1));  // by the trainer, who may clear it
                      for (const std::size_t i : {2u, 0u}) {
                          write(sync.gradient_view(i), random_gradient(model[i], rank, 0, i));
                          sync.mark_ready(i);
                      }
                      sync.finish();
                      finding.check(holds(sync.gradient_view(1), left), "p1 was touched");
                      for (const std::size_t i : {2u, 0u})
                          finding.check(holds(sync.gradient_view(i), expected_mean(model[i], ranks, 0, i)),
                                        "not the mean of gradient " + std::to_string(i));
                  }) == "");
}

TEST_CASE("the engine's accumulates() tells whether there are micro-batches that wait for their step") {
    for (const int ranks : {1, 2})
        for (const ReducerOptions& way : ways_to_accumulate)
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({10, 20});
                      model[1].uses = 2;
                      const int rank = comm.rank();
                      BareEngine<ThreadBackend> sync(
                          comm, model, way,
                          gradsync::detail::make_policies<ThreadBackend>(PerParameter(), OverlapBackward(), gradsync::AllReduce()));
                      const auto is = [&](bool expected, const std::string& when) {
                          finding.check(sync.accumulates() == expected, when + (expected ? ": nothing waits" : ": something waits"));
                      };
                      for (int step = 0; step < 2; ++step) {
                          is(false, "at first, and after finish()");
                          {
                              const auto guard = sync.no_sync();
                              is(true, "a guard lives");
                          }
                          is(false, "nothing was marked");
                          try {
                              const auto guard = sync.no_sync();
                              sync.mark_ready(1);
                              throw std::runtime_error("before its second use");
                          } catch (const std::runtime_error&) {
                          }
                          is(false, "an exception left half of a gradient");
                          {
                              const auto outer = sync.no_sync();
                              {
                                  const auto inner = sync.no_sync();
                                  sync.mark_ready(0);
                              }
                              is(true, "the outer guard lives");
                          }
                          is(true, "one gradient was marked");
                          sync.discard();
                          is(false, "it was discarded");
                          {
                              const auto guard = sync.no_sync();
                              backward(sync, model, rank, 100);
                          }
                          is(true, "a micro-batch was marked");
                          sync.discard();
                          is(false, "that was discarded");
                          backward(sync, model, rank, step);
                          sync.finish();
                          finding.check(wrong_mean(sync, model, ranks, step).empty(), wrong_mean(sync, model, ranks, step));
                      }
                  }) == "");
}

TEST_CASE("discard() in the middle of a step, and while a guard lives, is refused, and nothing is lost by it") {
    for (const int ranks : rank_counts(1, 3))
        CHECK(
            findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                auto model = tensors({10, 20, 30});
                const int rank = comm.rank();
                Reducer<ThreadBackend, PerParameter> sync(comm, model, {.accumulation = Accumulation::in_buckets});
                const auto refused = [&](const std::string& words) {
                    const Outcome outcome = outcome_of([&] { sync.discard(); });
                    finding.check(outcome.is(Errc::invalid_argument) && outcome.says("discard") && outcome.says(words), outcome.text);
                };
                {
                    const auto guard = sync.no_sync();
                    refused("a guard of no_sync() lives");
                    backward(sync, model, rank, 0);
                    refused("a guard of no_sync() lives");
                }
                for (const std::size_t i : {2u, 1u, 0u}) {
                    write(sync.gradient_view(i), random_gradient(model[i], rank, 1, i));
                    sync.mark_ready(i);
                    refused("call finish() first");
                }
                sync.finish();
                for (std::size_t i = 0; i < model.size(); ++i)
                    finding.check(holds(sync.gradient_view(i), mean_of_sums(model[i], ranks, {0, 1}, i)), "gradient " + std::to_string(i));
            }) == "");
}
