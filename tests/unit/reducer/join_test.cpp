// SPDX-License-Identifier: BSL-1.0
// Uneven inputs: ranks that have run out of data keep the others going, and stay in step.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/overlap_forward.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"
#include "support/tiny_network.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// Rank r has `batches[r]` batches. The result of every step is compared with the mean over those that had one.
template <class Buckets, class Overlap>
std::string check_uneven(const std::vector<int>& batches, JoinDivisor divisor, GradientStorage storage, Buckets buckets = {},
                         Overlap overlap = {}) {
    const int ranks = static_cast<int>(batches.size());
    return findings(ranks, [&](ThreadBackend comm, Finding& finding) {
        auto model = tensors({10, 20, 0, 300});
        const int rank = comm.rank();
        Reducer<ThreadBackend, Buckets, Overlap> sync(comm, model, {.gradients = storage, .divisor = divisor}, buckets, overlap);
        int step = 0;
        for (; sync.begin_step(step < batches[static_cast<std::size_t>(rank)]); ++step) {
            if (step < batches[static_cast<std::size_t>(rank)]) {
                backward(sync, model, rank, step);
            } else {
                for (std::size_t i = 0; i < model.size(); ++i)  // what is left in its gradients must not matter
                    write(sync.gradient_view(i), constant_bytes(DType::f32, model[i].count(), std::numeric_limits<double>::quiet_NaN()));
            }
            sync.finish();
            std::vector<Contribution> by;
            for (const int n : batches)
                by.push_back(step < n ? Contribution{1, 1} : Contribution{0, divisor == JoinDivisor::all_ranks ? 1.0 : 0.0});
            for (std::size_t i = 0; i < model.size(); ++i)
                finding.check(holds(sync.gradient_view(i), combined(DType::f32, gradients_of_all(model[i], ranks, step, i), by)),
                              "gradient " + std::to_string(i) + ", step " + std::to_string(step));
        }
        finding.check(step == *std::max_element(batches.begin(), batches.end()), "stopped after " + std::to_string(step) + " steps");
        // The next epoch starts as usual, with begin_step or without.
        backward(sync, model, rank, 50);
        sync.finish();
        finding.check(wrong_mean(sync, model, ranks, 50).empty(), wrong_mean(sync, model, ranks, 50));
    });
}

/// Ranks take turns at having no batch, and mark everything all the same, with whatever they hold. Of those that have one nobody uses
/// p1, and one of them uses p3.
template <class Buckets, class Overlap>
std::string check_marks_without_batch(int ranks, GradientStorage storage, Buckets buckets = {}, Overlap overlap = {}) {
    return findings(ranks, [&](ThreadBackend comm, Finding& finding) {
        auto model = tensors({10, 20, 0, 300, 7});
        const int rank = comm.rank();
        Reducer<ThreadBackend, Buckets, Overlap> sync(comm, model, {.gradients = storage, .unused = UnusedParameters::find_unused}, buckets,
                                                      overlap);
        for (int step = 0; step < 2 * ranks; ++step) {
            const int idle = step % ranks, eager = (step + 1) % ranks;
            const auto uses = [&](int r, std::size_t i) { return r != idle && i != 1 && (i != 3 || r == eager); };
            (void)sync.begin_step(rank != idle);
            Bytes held;  // by p1, when the backward is over
            for (const std::size_t i : shuffled(model.size(), static_cast<std::uint32_t>(rank + step * 10))) {
                Bytes own = random_gradient(model[i], rank, step, i);
                // What it marks must not matter, not even where it is no number.
                if (rank == idle) own = constant_bytes(DType::f32, model[i].count(), std::numeric_limits<double>::quiet_NaN());
                if (rank == idle && step % 2 == 1) own = random_gradient(model[i], rank, 1000 + step, i);
                if (i == 1) held = own;
                if (rank == idle || i == 1 || uses(rank, i)) write(sync.gradient_view(i), own);
                if (rank == idle || uses(rank, i)) sync.mark_ready(i);
            }
            (void)sync.finish();  // waits for averages that arrive later, too
            for (std::size_t i = 0; i < model.size(); ++i) {
                std::vector<Bytes> inputs;
                std::vector<Contribution> by;
                for (int r = 0; r < ranks; ++r) {
                    inputs.push_back(uses(r, i) ? random_gradient(model[i], r, step, i) : Bytes(model[i].gradient.size()));
                    by.push_back(r == idle ? Contribution{0, 0} : Contribution{1, 1});
                }
                finding.check(holds(sync.gradient_view(i), i == 1 ? held : combined(DType::f32, inputs, by)),
                              "gradient " + std::to_string(i) + ", step " + std::to_string(step));
            }
        }
    });
}

}  // namespace

TEST_CASE("PyTorch parity: uneven inputs are divided as JoinDivisor says") {
    const std::vector<std::vector<int>> uneven{{2},       {3, 1},    {1, 3},       {0, 2},       {2, 2},
                                               {3, 0, 1}, {1, 2, 3}, {4, 0, 0, 1}, {0, 0, 0, 2}, {0, 0}};
    for (const auto& batches : uneven)
        for (const JoinDivisor divisor : {JoinDivisor::live_ranks, JoinDivisor::all_ranks})
            for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
                CHECK(check_uneven<Flat, OverlapBackward>(batches, divisor, storage) == "");
                CHECK(check_uneven<PerParameter, NoOverlap>(batches, divisor, storage) == "");
                CHECK(check_uneven(batches, divisor, storage, SizeCappedBuckets(130), OverlapBackward(Progress::thread)) == "");
            }
}

TEST_CASE("PyTorch parity: uneven inputs equal local training on all inputs") {
    // Rank r has r + 1 batches of its own; in each step a local trainer sees all batches that there are.
    const auto data = samples(200);
    constexpr std::size_t batch_size = 5;
    const auto batch_of = [&](int rank, int step) {
        return std::span(data).subspan(static_cast<std::size_t>(rank * 40 + step * 5), batch_size);
    };
    for (const int ranks : rank_counts(2)) {
        TinyNetwork local;
        for (int step = 0; step < ranks; ++step) {
            std::vector<Sample> joined;
            for (int r = step; r < ranks; ++r) joined.insert(joined.end(), batch_of(r, step).begin(), batch_of(r, step).end());
            local.backward(joined, [](std::size_t) {});
            local.adam();
        }
        std::vector<std::vector<std::vector<float>>> weights = run_threads(ranks, [&](ThreadBackend comm) {
            TinyNetwork model;
            const int rank = comm.rank();
            Reducer<ThreadBackend, SizeCappedBuckets> sync(comm, model.parameters(), {}, SizeCappedBuckets(60));
            for (int step = 0; sync.begin_step(step <= rank); ++step) {
                if (step <= rank) model.backward(batch_of(rank, step), [&](std::size_t i) { sync.mark_ready(i); });
                sync.finish();
                model.adam();
            }
            return model.values();
        });
        for (const auto& w : weights) CHECK(w == weights[0]);
        CHECK(close(weights[0], local.values()));
    }
}

TEST_CASE("uneven inputs with weights: local sums over different numbers of samples equal local training") {
    const auto data = samples(60);
    for (const int ranks : rank_counts()) {
        TinyNetwork local;
        std::vector<std::size_t> counts{7, 3, 11, 0};  // samples of each rank; the last one has none
        counts.resize(static_cast<std::size_t>(ranks));
        std::size_t total = 0;
        for (const std::size_t n : counts) total += n;
        for (int step = 0; step < 3; ++step) {
            local.backward(std::span(data).first(total), [](std::size_t) {});
            local.adam();
        }
        for (const bool sums : {true, false}) {
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      TinyNetwork model;
                      const auto rank = static_cast<std::size_t>(comm.rank());
                      std::size_t first = 0;
                      for (std::size_t r = 0; r < rank; ++r) first += counts[r];
                      const auto own = std::span(data).subspan(first, counts[rank]);
                      Reducer sync(comm, model.parameters(), {.averaging = sums ? Averaging::mean_over_count : Averaging::weighted_mean});
                      for (int step = 0; step < 3; ++step) {
                          sync.set_weight(static_cast<double>(own.size()));
                          const bool any = sync.begin_step(!own.empty());
                          finding.check(any, "nobody has a batch");
                          if (!own.empty())
                              model.backward(
                                  own, !sums, false, [&](std::size_t i) { return std::span(model.gradient(i)); },
                                  [&](std::size_t i) { sync.mark_ready(i); });
                          sync.finish();
                          model.adam();
                      }
                      finding.check(close(model.values(), local.values()), "the weights differ from local training");
                  }) == "");
        }
    }
}

TEST_CASE("begin_step in the middle of a step is refused") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              Reducer<ThreadBackend, Flat, NoOverlap> sync(comm, model);
              sync.mark_ready(1);
              const Outcome outcome = outcome_of([&] { (void)sync.begin_step(true); });
              finding.check(outcome.is(Errc::invalid_argument) && outcome.says("finish()"), outcome.text);
              sync.mark_ready(0);
              sync.finish();
          }) == "");
}

TEST_CASE("a rank without a batch that marks all the same: agreed use is that of the others, and what nobody used is left untouched") {
    for (const int ranks : rank_counts(2))
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
            CAPTURE(ranks);
            CAPTURE(static_cast<int>(storage));
            CHECK(check_marks_without_batch<Flat, NoOverlap>(ranks, storage) == "");
            CHECK(check_marks_without_batch<PerParameter, OverlapBackward>(ranks, storage) == "");
            CHECK(check_marks_without_batch(ranks, storage, SizeCappedBuckets(130), OverlapBackward(Progress::thread)) == "");
            CHECK(check_marks_without_batch<PerParameter, OverlapForward>(ranks, storage) == "");
        }
}

TEST_CASE("micro-batches of a rank that has no batch for the step which was to end them are not used") {
    for (const int ranks : {2, 3})
        for (const bool marks : {false, true})  // in that step, too
            for (const ReducerOptions& way :
                 {ReducerOptions{}, {.accumulation = Accumulation::in_buckets}, {.gradients = GradientStorage::in_buckets}})
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          auto model = tensors({10, 20, 300});
                          const int rank = comm.rank();
                          ReducerOptions options = way;
                          options.unused = UnusedParameters::find_unused;
                          Reducer<ThreadBackend, PerParameter> sync(comm, model, options);
                          const bool idle = rank == ranks - 1;
                          if (idle) {
                              const auto guard = sync.no_sync();
                              backward(sync, model, rank, 100);
                          }
                          (void)sync.begin_step(!idle);
                          if (!idle || marks)
                              for (const std::size_t i : {2u, 0u}) {
                                  write(sync.gradient_view(i), random_gradient(model[i], rank, 0, i));
                                  sync.mark_ready(i);
                              }
                          const Bytes left = bytes_of(sync.gradient_view(1));
                          sync.finish();
                          finding.check(holds(sync.gradient_view(1), left), "p1 was touched, which no rank with a batch used");
                          for (const std::size_t i : {2u, 0u})
                              finding.check(holds(sync.gradient_view(i), expected_mean(model[i], ranks - 1, 0, i)),
                                            "not the mean over live ranks of gradient " + std::to_string(i));
                          backward(sync, model, rank, 1);
                          sync.finish();
                          finding.check(wrong_mean(sync, model, ranks, 1).empty(), wrong_mean(sync, model, ranks, 1));
                      }) == "");
}
