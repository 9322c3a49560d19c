// ctest: PROCESSORS 2
// Micro-batches: no_sync(), and who adds up what in which precision.
#include <doctest/doctest.h>

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
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

}  // namespace

TEST_CASE("PyTorch parity: three Adam steps equal local training on the joined batch") {
    const auto data = samples(24);
    TinyNetwork local;
    for (int step = 0; step < 3; ++step) {
        local.backward(data, [](std::size_t) {});
        local.adam();
    }
    REQUIRE(local.loss(data) < TinyNetwork().loss(data));
    for (const int ranks : {1, 2, 3, 4})
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      TinyNetwork model(comm.rank() == 0 ? 1 : 99);  // the others get rank 0's weights
                      const auto own = shard(data, comm.rank(), ranks);
                      Reducer<ThreadBackend, SizeCappedBuckets, OverlapBackward> sync(comm, model.parameters(), {.gradients = storage},
                                                                                      SizeCappedBuckets(60));
                      sync.broadcast_parameters();
                      for (int step = 0; step < 3; ++step) {
                          model.backward(
                              own, true, false, [&](std::size_t i) { return sync.gradient<float>(i); },
                              [&](std::size_t i) { sync.mark_ready(i); });
                          sync.finish();
                          model.adam([&](std::size_t i) { return std::span<const float>(sync.gradient<float>(i)); });
                      }
                      finding.check(close(model.values(), local.values()), "the weights differ from local training");
                  }) == "");
        }
}

TEST_CASE("PyTorch parity: no_sync accumulation equals local, gradients copied and as bucket views") {
    const auto data = samples(36);
    constexpr int micro_batches = 3;
    for (const int ranks : {1, 2, 3, 4})
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
                              [&](std::size_t i) { return sync.gradient<float>(i); }, [&](std::size_t i) { sync.mark_ready(i); });
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
                              scaled.emplace_back(sync.gradient<float>(i).begin(), sync.gradient<float>(i).end());
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
        for (const int ranks : {1, 2, 3}) {
            CAPTURE(ranks);
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({50, 3, 700}, dtype);
                      const int rank = comm.rank();
                      Reducer<ThreadBackend, SizeCappedBuckets> sync(comm, model, {.accumulation = Accumulation::in_buckets},
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
                              // In f32 (f64): each rank's sum over micro-batches, then the mean over ranks.
                              const DType wide = accumulator_of(dtype);
                              std::vector<Bytes> sums;
                              for (int r = 0; r < ranks; ++r) {
                                  std::vector<Bytes> terms;
                                  for (int m = 0; m < micro_batches; ++m) {
                                      const Bytes narrow = random_gradient(model[i], r, step * 10 + m, i);
                                      Bytes widened(model[i].count() * size_of(wide));
                                      kernel::convert(narrow.data(), dtype, widened.data(), wide, model[i].count());
                                      terms.push_back(widened);
                                  }
                                  sums.push_back(sum_of(wide, terms));
                              }
                              const Bytes mean = mean_of(wide, sums);
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
        for (const int ranks : {2, 3, 4}) {
            const auto shape = tensors({50, 3, 700}, dtype);
            const ReducerOptions options{.averaging = Averaging::mean_over_count, .accumulation = Accumulation::in_buckets};
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
                backward(sync, model, rank, 7);
                sync.finish();
                if (rank == 0)
                    for (const Tensor& t : model) together.push_back(t.gradient);
            });
            CAPTURE(ranks);
            CHECK(alone == together);
        }
}

TEST_CASE("a no_sync guard that an exception leaves, and guards within guards") {
    for (const int ranks : {1, 2, 3}) {
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
    for (const int ranks : {1, 2, 3})
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
            for (const UnusedParameters unused : {UnusedParameters::error, UnusedParameters::agree}) {
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

TEST_CASE("Accumulation::in_buckets and reduce_dtype are for borrowed gradients of floating types") {
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
