// SPDX-License-Identifier: BSL-1.0
// Mean, sum, weighted mean, mean over a count.
#include <doctest/doctest.h>

#include <cfenv>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

const std::vector<double> token_counts{1024, 37, 0, 4099};

/// One step at every world size, types and storages; `by(ranks)` says what each rank brings.
template <class By>
void check_averaging(Averaging averaging, const std::vector<DType>& dtypes, By&& by) {
    for (const DType dtype : dtypes)
        for (const int ranks : rank_counts())
            for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
                CAPTURE(ranks);
                CAPTURE(name_of(dtype));
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          auto model = tensors({10, 1, 0, 300}, dtype);
                          const int rank = comm.rank();
                          Reducer<ThreadBackend, SizeCappedBuckets> sync(comm, model, {.gradients = storage, .averaging = averaging},
                                                                         SizeCappedBuckets(200));
                          for (int step = 0; step < 2; ++step) {
                              if (averaging == Averaging::weighted_mean || averaging == Averaging::mean_over_count)
                                  sync.set_weight(token_counts[static_cast<std::size_t>(rank)]);
                              backward(sync, model, rank, step);
                              sync.finish();
                              for (std::size_t i = 0; i < model.size(); ++i)
                                  finding.check(
                                      holds(sync.gradient_view(i), combined(dtype, gradients_of_all(model[i], ranks, step, i), by(ranks))),
                                      "gradient " + std::to_string(i));
                          }
                      }) == "");
            }
}

const std::vector<DType> floating{DType::f16, DType::bf16, DType::f32, DType::f64};

}  // namespace

TEST_CASE("Averaging::sum adds up the gradients of all ranks") {
    const auto by = [](int ranks) {
        std::vector<Contribution> by_rank(static_cast<std::size_t>(ranks), {1, 0});
        by_rank[0].weight = 1;
        return by_rank;
    };
    check_averaging(Averaging::sum,
                    {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i8, DType::u8, DType::i32, DType::u32, DType::i64, DType::u64},
                    by);
}

TEST_CASE("Averaging::weighted_mean weights local means by tokens") {
    check_averaging(Averaging::weighted_mean, floating, [](int ranks) {
        std::vector<Contribution> by;
        for (int r = 0; r < ranks; ++r)
            by.push_back({token_counts[static_cast<std::size_t>(r)], token_counts[static_cast<std::size_t>(r)]});
        // One rank alone: x w / w is x.
        return ranks == 1 ? std::vector<Contribution>(1) : by;
    });
}

TEST_CASE("Averaging::mean_over_count divides local sums by all tokens") {
    check_averaging(Averaging::mean_over_count, floating, [](int ranks) {
        std::vector<Contribution> by;
        for (int r = 0; r < ranks; ++r) by.push_back({1, token_counts[static_cast<std::size_t>(r)]});
        return by;
    });
}

TEST_CASE("means weighted by token counts agree with an oracle in f64") {
    for (const int ranks : rank_counts(2)) {
        const std::vector<Tensor> shape = tensors({1000});
        std::vector<double> exact(1000);
        double total = 0;
        for (int r = 0; r < ranks; ++r) {
            Bytes gradient = random_gradient(shape[0], r, 0, 0);
            const double w = token_counts[static_cast<std::size_t>(r)];
            const auto x = numbers({gradient.data(), 1000, DType::f32, MemorySpace::host});
            for (std::size_t k = 0; k < 1000; ++k) exact[k] += w * x[k];
            total += w;
        }
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto model = shape;
                  const int rank = comm.rank();
                  Reducer sync(comm, model, {.averaging = Averaging::weighted_mean});
                  sync.set_weight(token_counts[static_cast<std::size_t>(rank)]);
                  backward(sync, model, rank, 0);
                  sync.finish();
                  const auto x = numbers(sync.gradient_view(0));
                  for (std::size_t k = 0; k < 1000; ++k)
                      finding.check(std::abs(x[k] - exact[k] / total) <= 4e-7, "element " + std::to_string(k));
              }) == "");
    }
}

TEST_CASE("weights may change from step to step, and all be 0") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10});
              const int rank = comm.rank();
              Reducer sync(comm, model, {.averaging = Averaging::weighted_mean});
              for (int step = 0; step < 4; ++step) {
                  const auto weight_of = [&](int r) { return step == 2 ? 0.0 : static_cast<double>(step + 3 * r); };
                  sync.set_weight(weight_of(rank));
                  backward(sync, model, rank, step);
                  sync.finish();
                  std::vector<Contribution> by;
                  for (int r = 0; r < 2; ++r) by.push_back({weight_of(r), weight_of(r)});
                  finding.check(holds(sync.gradient_view(0), combined(DType::f32, gradients_of_all(model[0], 2, step, 0), by)),
                                "step " + std::to_string(step));
              }
          }) == "");
}

TEST_CASE("what a rank without weight holds has no influence, NaN and infinity neither") {
    for (const double poison : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
        for (const bool batchless : {true, false}) {
            CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({10, 200}, DType::bf16);
                      const int rank = comm.rank();
                      Reducer<ThreadBackend, Flat> sync(comm, model, {.averaging = Averaging::weighted_mean});
                      if (batchless) finding.check(sync.begin_step(rank != 1), "nobody has a batch");
                      if (!batchless || rank != 1) sync.set_weight(rank == 1 ? 0 : 1);
                      if (rank != 1) {
                          backward(sync, model, rank, 0);
                      } else {
                          for (std::size_t i = 0; i < model.size(); ++i) {
                              write(sync.gradient_view(i), constant_bytes(DType::bf16, model[i].count(), poison));
                              if (!batchless) sync.mark_ready(i);
                          }
                      }
                      sync.finish();
                      for (std::size_t i = 0; i < model.size(); ++i)
                          finding.check(holds(sync.gradient_view(i),
                                              combined(DType::bf16, gradients_of_all(model[i], 3, 0, i), {{1, 1}, {0, 0}, {1, 1}})),
                                        "gradient " + std::to_string(i));
                  }) == "");
        }
}

TEST_CASE("a NaN of a rank that takes part reaches every rank") {
    CHECK(findings(3, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10});
              const int rank = comm.rank();
              Reducer sync(comm, model);
              if (rank == 2) write(sync.gradient_view(0), constant_bytes(DType::f32, 10, std::numeric_limits<double>::quiet_NaN()));
              sync.mark_ready(0);
              sync.finish();
              for (const double x : numbers(sync.gradient_view(0))) finding.check(std::isnan(x), "a NaN got lost");
          }) == "");
}

TEST_CASE("set_weight refuses what is no weight, and averages without weights") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              Reducer plain(comm, model);
              finding.check(outcome_of([&] { plain.set_weight(2); }).says("weighted_mean"), "a weight for a plain mean");
              Reducer<ThreadBackend, PerParameter, OverlapBackward> weighted(comm, model, {.averaging = Averaging::weighted_mean});
              for (const double w : {-1.0, 1e39, 1e-46, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
                  finding.check(outcome_of([&] { weighted.set_weight(w); }).says("a weight must be 0, or from 1.2e-38 to 3.4e38, not "),
                                std::to_string(w) + " was taken");
              finding.check(outcome_of([&] { weighted.set_weight(1e-46); }).says("not 1e-46"), "another number is named");
              weighted.set_weight(0.5);
              weighted.mark_ready(1);
              finding.check(outcome_of([&] { weighted.set_weight(1); }).says("in flight"), "a weight within the step");
              weighted.mark_ready(0);
              weighted.finish();
              weighted.set_weight(1);
          }) == "");
}

TEST_CASE("a step without a weight ends in an error that asks for one, on every rank") {
    for (const Averaging averaging : {Averaging::weighted_mean, Averaging::mean_over_count})
        for (const int ranks : rank_counts(1, 3))
            for (const bool first : {true, false}) {
                const auto seen = outcomes(ranks, [&](ThreadBackend comm) {
                    auto model = tensors({10, 20});
                    Reducer sync(comm, model, {.averaging = averaging});
                    if (!first) {
                        sync.set_weight(2);
                        backward(sync, model, comm.rank(), 0);
                        sync.finish();
                    }
                    if (comm.rank() != ranks - 1) sync.set_weight(1);  // the last one forgets it
                    backward(sync, model, comm.rank(), 1);
                    sync.finish();
                });
                for (const Outcome& outcome : seen) {
                    INFO(outcome.text);
                    CHECK(outcome.says("rank " + std::to_string(ranks - 1) +
                                       " gave no weight for this step; call set_weight() in each step"));
                }
                CHECK(seen.back().is(Errc::invalid_argument));
            }
}

TEST_CASE("a Reducer computes nothing invalid, which programs may trap to find NaNs") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 7}, DType::f32);
              std::feclearexcept(FE_ALL_EXCEPT);
              Reducer sync(comm, model);
              backward(sync, model, comm.rank(), 0);
              sync.finish();
              finding.check(std::fetestexcept(FE_INVALID | FE_DIVBYZERO) == 0, "an invalid operation, or a division by zero");
          }) == "");
}
