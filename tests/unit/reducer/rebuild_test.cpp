// SPDX-License-Identifier: BSL-1.0
// Buckets planned anew from the order in which gradients became ready.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>

#include "support/averaging_oracle.hpp"
#include "support/plans.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

const std::vector<std::size_t> small_sizes{10, 20, 30, 5, 0, 50, 7};

/// Marks in the order given, but on rank 0 only; the others have orders of their own.
template <class R>
void ordered_backward(R& sync, const std::vector<Tensor>& model, int rank, int batch, const std::vector<std::size_t>& rank_0s) {
    const auto order = rank == 0 ? rank_0s : shuffled(model.size(), static_cast<std::uint32_t>(rank * 100 + batch));
    for (const std::size_t i : order) {
        write(sync.gradient_view(i), random_gradient(model[i], rank, batch, i));
        sync.mark_ready(i);
    }
}

const std::vector<std::size_t> arrival{3, 0, 6, 5, 4, 1, 2};

}  // namespace

TEST_CASE("PyTorch parity: rebuild_buckets follows rank 0's order of arrival, on every rank") {
    for (const int ranks : rank_counts())
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
            for (const Accumulation accumulation : {Accumulation::in_gradients, Accumulation::in_buckets}) {
                if (storage == GradientStorage::in_buckets && accumulation == Accumulation::in_buckets) continue;
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          auto model = tensors(small_sizes);
                          const int rank = comm.rank();
                          const SizeCappedBuckets policy(150);
                          Reducer<ThreadBackend, SizeCappedBuckets, OverlapBackward> sync(
                              comm, model, {.gradients = storage, .accumulation = accumulation}, policy);
                          ordered_backward(sync, model, rank, 0, arrival);
                          sync.finish();
                          const auto before = buckets(sync.plan());
                          finding.check(sync.rebuild_buckets(), "the plan did not change");
                          finding.check(buckets(sync.plan()) != before, "the plan did not change, but was said to");
                          if (ranks > 1 || storage == GradientStorage::in_buckets)
                              finding.check(sync.plan() == policy.plan(floats(small_sizes), arrival),
                                            "not the plan of the order of arrival");
                          finding.check(wrong_mean(sync, model, ranks, 0).empty(),
                                        "after rebuild_buckets: " + wrong_mean(sync, model, ranks, 0));
                          finding.check(sync.statistics().buckets.size() == sync.plan().size(), "statistics of another plan");
                          for (int step = 1; step < 4; ++step) {
                              backward(sync, model, rank, step);
                              sync.finish();
                              finding.check(wrong_mean(sync, model, ranks, step).empty(), wrong_mean(sync, model, ranks, step));
                          }
                          finding.check(!sync.rebuild_buckets(), "a second time without a new order");
                      }) == "");
            }
}

TEST_CASE("record_order lets a later step decide") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors(small_sizes);
              const int rank = comm.rank();
              Reducer<ThreadBackend, PerParameter> sync(comm, model);
              ordered_backward(sync, model, rank, 0, reversed(small_sizes.size()));
              sync.finish();
              finding.check(!sync.rebuild_buckets(), "the same order, another plan");
              sync.record_order();
              ordered_backward(sync, model, rank, 1, arrival);
              sync.finish();
              ordered_backward(sync, model, rank, 2, in_order(small_sizes.size()));  // not recorded
              sync.finish();
              finding.check(sync.rebuild_buckets(), "another order, the same plan");
              finding.check(sync.plan() == PerParameter{}.plan({}, arrival), "not the recorded order");
          }) == "");
}

TEST_CASE("rebuild_buckets keeps what the trainer did to its gradients, and what micro-batches left") {
    for (const int ranks : rank_counts(1, 3))
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
            // Both ways between buckets of one parameter, which may be the trainer's own memory, and of several.
            for (const bool more_alone : {true, false}) {
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          auto model = tensors({10, 30, 10, 30});
                          const int rank = comm.rank();
                          const std::vector<std::size_t> apart{0, 2, 1, 3}, paired{0, 1, 2, 3};
                          Reducer<ThreadBackend, SizeCappedBuckets> sync(comm, model, {.gradients = storage}, SizeCappedBuckets(160));
                          ordered_backward(sync, model, rank, 0, more_alone ? paired : apart);
                          sync.finish();
                          (void)sync.rebuild_buckets();
                          sync.record_order();
                          ordered_backward(sync, model, rank, 1, more_alone ? apart : paired);
                          sync.finish();
                          // The first micro-batch of the next step.
                          {
                              const auto guard = sync.no_sync();
                              backward(sync, model, rank, 70);
                          }
                          finding.check(sync.rebuild_buckets(), "the plan did not change");
                          for (std::size_t i = 0; i < model.size(); ++i)
                              finding.check(holds(sync.gradient_view(i), random_gradient(model[i], rank, 70, i)),
                                            "an accumulated gradient was lost");
                          for (std::size_t i = 0; i < model.size(); ++i) sync.mark_ready(i);
                          sync.finish();
                          finding.check(wrong_mean(sync, model, ranks, 70).empty(), wrong_mean(sync, model, ranks, 70));
                      }) == "");
            }
}

TEST_CASE("rebuild_buckets keeps what the reducer accumulated") {
    for (const int ranks : rank_counts(1, 3))
        for (const DType dtype : {DType::f32, DType::bf16}) {
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors(small_sizes, dtype);
                      const int rank = comm.rank();
                      Reducer<ThreadBackend, SizeCappedBuckets> sync(comm, model, {.accumulation = Accumulation::in_buckets},
                                                                     SizeCappedBuckets(150));
                      ordered_backward(sync, model, rank, 0, arrival);
                      sync.finish();
                      {
                          const auto guard = sync.no_sync();
                          backward(sync, model, rank, 1);
                      }
                      finding.check(sync.rebuild_buckets(), "the plan did not change");
                      // The second micro-batch brings zeros: what is left is the first one's mean.
                      for (std::size_t i = 0; i < model.size(); ++i) {
                          write(model[i].gradient_view(), Bytes(model[i].gradient.size()));
                          sync.mark_ready(i);
                      }
                      sync.finish();
                      finding.check(wrong_mean(sync, model, ranks, 1).empty(), wrong_mean(sync, model, ranks, 1));
                  }) == "");
        }
}

TEST_CASE("rebuild_buckets in the middle of a step is refused") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              const int rank = comm.rank();
              Reducer<ThreadBackend, Flat, NoOverlap> sync(comm, model);
              write(sync.gradient_view(1), random_gradient(model[1], rank, 0, 1));
              sync.mark_ready(1);
              const Outcome outcome = outcome_of([&] { (void)sync.rebuild_buckets(); });
              finding.check(outcome.is(Errc::invalid_argument) && outcome.says("finish()"), outcome.text);
              write(sync.gradient_view(0), random_gradient(model[0], rank, 0, 0));
              sync.mark_ready(0);
              sync.finish();
              finding.check(wrong_mean(sync, model, 2, 0).empty(), wrong_mean(sync, model, 2, 0));
          }) == "");
}

TEST_CASE("rebuild_buckets after a step without marks keeps the place of unused parameters, and a rank without a batch decides nothing") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({1, 2, 3, 4});
              Reducer<ThreadBackend, PerParameter> sync(comm, model, {.unused = UnusedParameters::find_unused});
              (void)sync.begin_step(comm.rank() == 1);
              if (comm.rank() == 1)
                  for (const std::size_t i : {0u, 1u, 2u, 3u}) sync.mark_ready(i);
              sync.finish();
              finding.check(!sync.rebuild_buckets(), "rank 1's order was taken");
              sync.record_order();
              for (const std::size_t i : {1u, 2u}) sync.mark_ready(i);
              sync.finish();
              finding.check(sync.rebuild_buckets(), "the plan did not change");
              finding.check(buckets(sync.plan()) == Buckets{{1}, {2}, {3}, {0}}, "not marked ones first, the others as before");
          }) == "");
}
