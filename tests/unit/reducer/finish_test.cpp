// SPDX-License-Identifier: BSL-1.0
// finish() and try_finish().
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/gradsync.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

template <class Overlap>
void check_try_finish(UnusedParameters unused, Overlap overlap = {}) {
    for (const int ranks : rank_counts()) {
        CAPTURE(ranks);
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto model = tensors({10, 20, 0, 3000});
                  const int rank = comm.rank();
                  Reducer<ThreadBackend, SizeCappedBuckets, Overlap> sync(comm, model, {.unused = unused}, SizeCappedBuckets(120), overlap);
                  for (int step = 0; step < 6; ++step) {
                      finding.check(unused == UnusedParameters::find_unused || !sync.try_finish(), "finished before the backward");
                      backward(sync, model, rank, step);
                      // Some ranks poll, others block, some do both.
                      const int how = (rank + step) % 3;
                      if (how == 0) sync.finish();
                      else if (how == 1)
                          while (!sync.try_finish()) std::this_thread::yield();
                      else if (!sync.try_finish()) sync.finish();
                      finding.check(wrong_mean(sync, model, ranks, step).empty(), wrong_mean(sync, model, ranks, step));
                      finding.check(sync.statistics().steps == static_cast<std::uint64_t>(step + 1), "steps were counted wrongly");
                  }
              }) == "");
    }
}

}  // namespace

TEST_CASE("a loop of try_finish equals finish") {
    check_try_finish<OverlapBackward>(UnusedParameters::error);
    check_try_finish<NoOverlap>(UnusedParameters::error);
    check_try_finish(UnusedParameters::error, OverlapBackward(Progress::thread));
    check_try_finish<OverlapBackward>(UnusedParameters::find_unused);
}

TEST_CASE("try_finish says false while a gradient is not marked, and loses nothing") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20, 30});
              const int rank = comm.rank();
              Reducer<ThreadBackend, Flat> sync(comm, model);
              for (int step = 0; step < 3; ++step) {
                  for (const std::size_t i : {2u, 1u, 0u}) {
                      for (int k = 0; k < 10; ++k) finding.check(!sync.try_finish(), "finished too early");
                      write(sync.gradient_view(i), random_gradient(model[i], rank, step, i));
                      sync.mark_ready(i);
                  }
                  while (!sync.try_finish()) std::this_thread::yield();
                  finding.check(wrong_mean(sync, model, 2, step).empty(), wrong_mean(sync, model, 2, step));
              }
          }) == "");
}

TEST_CASE("try_finish works on a rank without a batch") {
    CHECK(findings(3, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20, 30});
              const int rank = comm.rank();
              Reducer<ThreadBackend, Flat> sync(comm, model);
              (void)sync.begin_step(rank == 0);
              if (rank == 0) backward(sync, model, rank, 0);
              while (!sync.try_finish()) std::this_thread::yield();
              for (std::size_t i = 0; i < model.size(); ++i)
                  finding.check(holds(sync.gradient_view(i), random_gradient(model[i], 0, 0, i)), "not rank 0's gradient");
          }) == "");
}

TEST_CASE("two Reducers share a communicator, or have a duplicate each") {
    for (const int ranks : rank_counts(1, 3)) {
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto one = tensors({10, 20, 30}), two = tensors({500, 7}, DType::bf16);
                  const int rank = comm.rank();
                  const auto train_both = [&](auto& first, auto& second) {
                      for (int step = 0; step < 3; ++step) {
                          backward(first, one, rank, step);
                          first.finish();
                          backward(second, two, rank, step);
                          second.finish();
                          finding.check(wrong_mean(first, one, ranks, step).empty(), wrong_mean(first, one, ranks, step));
                          finding.check(wrong_mean(second, two, ranks, step).empty(), wrong_mean(second, two, ranks, step));
                      }
                  };
                  Reducer<ThreadBackend, PerParameter> a(comm, one), b(comm, two);
                  train_both(a, b);
                  // With orders of their own, their backwards may interleave in any way.
                  Reducer<ThreadBackend, PerParameter> c(comm.duplicate(), one), d(comm.duplicate(), two);
                  for (int step = 0; step < 3; ++step) {
                      const auto mark = [&](auto& sync, auto& model, std::size_t i) {
                          write(sync.gradient_view(i), random_gradient(model[i], rank, step, i));
                          sync.mark_ready(i);
                      };
                      for (const std::size_t k : shuffled(5, static_cast<std::uint32_t>(rank + step)))
                          k < 3 ? mark(c, one, k) : mark(d, two, k - 3);
                      rank % 2 ? c.finish() : d.finish();
                      rank % 2 ? d.finish() : c.finish();
                      finding.check(wrong_mean(c, one, ranks, step).empty(), wrong_mean(c, one, ranks, step));
                      finding.check(wrong_mean(d, two, ranks, step).empty(), wrong_mean(d, two, ranks, step));
                  }
              }) == "");
    }
}
