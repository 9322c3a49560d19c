// SPDX-License-Identifier: BSL-1.0
// PyTorch parity: the logging fields. No time is asserted, but what holds of any times.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

template <class Overlap>
void check_statistics(UnusedParameters unused, Overlap overlap) {
    for (const int ranks : rank_counts()) {
        CAPTURE(ranks);
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto model = tensors({1000, 20, 30'000, 50});
                  const int rank = comm.rank();
                  Reducer sync(comm, model, ReducerOptions{.gradients = GradientStorage::in_buckets, .unused = unused}, PerParameter(),
                               overlap);
                  finding.check(sync.statistics().steps == 0 && sync.statistics().mean().bytes == 0, "something before the first step");
                  finding.check(sync.statistics().overlap_ratio() == 0, "overlap before the first step");
                  finding.check(sync.statistics().transport == std::to_string(ranks) + (ranks == 1 ? " thread" : " threads"),
                                sync.statistics().transport);
                  double exposed = 0, communication = 0;
                  for (int step = 0; step < 10; ++step) {
                      const auto begin = std::chrono::steady_clock::now();
                      backward(sync, model, rank, step);
                      sync.finish();
                      const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
                      const Statistics& s = sync.statistics();
                      finding.check(s.steps == static_cast<std::uint64_t>(step + 1), "steps");
                      finding.check(s.last.exposed_seconds >= 0 && s.last.exposed_seconds <= wall, "exposed time");
                      finding.check(s.last.communication_seconds >= 0 && s.last.communication_seconds <= wall, "communication time");
                      finding.check(s.last.overlap_ratio() >= 0 && s.last.overlap_ratio() <= 1, "overlap ratio");
                      exposed += s.last.exposed_seconds;
                      communication += s.last.communication_seconds;
                      finding.check(s.buckets.size() == 4, "buckets");
                      if (ranks == 1) {
                          finding.check(s.last.bytes == 0 && s.last.collectives == 0 && s.last.communication_seconds == 0,
                                        "one rank sends nothing");
                          continue;
                      }
                      finding.check(s.last.bytes == 4 * (1000 + 20 + 30'000 + 50), "bytes");
                      finding.check(s.last.collectives == (unused == UnusedParameters::find_unused ? 5u : 4u), "collectives");
                      finding.check(s.buckets[0].launch_seconds == 0, "the first launch is not 0");
                      double latest = 0;
                      for (std::size_t b = 0; b < s.buckets.size(); ++b) {
                          finding.check(s.buckets[b].bytes == model[sync.plan().bucket(b)[0]].gradient.size(), "bytes of a bucket");
                          finding.check(s.buckets[b].launch_seconds <= s.buckets[b].end_seconds, "a bucket ends before its launch");
                          finding.check(s.buckets[b].end_seconds <= wall, "a bucket ends after the step");
                          if (b != 0)
                              finding.check(s.buckets[b - 1].launch_seconds <= s.buckets[b].launch_seconds, "launches out of order");
                          latest = std::max(latest, s.buckets[b].end_seconds);
                      }
                      finding.check(s.last.communication_seconds <= latest * 1.0001 + 1e-9, "more communication than time");
                  }
                  const Statistics& s = sync.statistics();
                  finding.check(s.total.bytes == 10 * s.last.bytes && s.mean().bytes == s.last.bytes, "bytes in all");
                  finding.check(s.mean().collectives == s.last.collectives, "collectives on average");
                  finding.check(
                      std::abs(s.total.exposed_seconds - exposed) < 1e-9 && std::abs(s.mean().exposed_seconds - exposed / 10) < 1e-9,
                      "exposed in all");
                  finding.check(std::abs(s.total.communication_seconds - communication) < 1e-9, "communication in all");
                  finding.check(s.overlap_ratio() >= 0 && s.overlap_ratio() <= 1, "overlap ratio in all");
              }) == "");
    }
}

}  // namespace

TEST_CASE("PyTorch parity: logging fields are present and consistent") {
    check_statistics(UnusedParameters::error, OverlapBackward());
    check_statistics(UnusedParameters::find_unused, NoOverlap());
    check_statistics(UnusedParameters::error, OverlapBackward(Progress::thread));
}

TEST_CASE("without overlap all communication is exposed") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({100'000, 20});
              const int rank = comm.rank();
              Reducer<ThreadBackend, Flat, NoOverlap> sync(comm, model);
              for (int step = 0; step < 5; ++step) {
                  backward(sync, model, rank, step);
                  sync.finish();
                  finding.check(sync.statistics().last.exposed_seconds >= sync.statistics().last.communication_seconds,
                                "communication that nobody saw");
                  finding.check(sync.statistics().last.overlap_ratio() == 0, "overlap");
              }
          }) == "");
}

TEST_CASE("micro-batches under no_sync communicate nothing") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({100, 20});
              const int rank = comm.rank();
              Reducer<ThreadBackend, PerParameter> sync(comm, model);
              {
                  const auto guard = sync.no_sync();
                  for (int m = 0; m < 3; ++m) backward(sync, model, rank, m);
              }
              finding.check(sync.statistics().steps == 0, "a micro-batch is no step");
              backward(sync, model, rank, 3);
              sync.finish();
              finding.check(sync.statistics().steps == 1 && sync.statistics().last.collectives == 2, "one step of two collectives");
          }) == "");
}

TEST_CASE("StepStatistics keeps the overlap ratio within its bounds") {
    CHECK(StepStatistics{}.overlap_ratio() == 0);
    CHECK(StepStatistics{.communication_seconds = 2, .exposed_seconds = 0.5}.overlap_ratio() == 0.75);
    CHECK(StepStatistics{.communication_seconds = 2, .exposed_seconds = 5}.overlap_ratio() == 0);
    CHECK(StepStatistics{.communication_seconds = 0, .exposed_seconds = 5}.overlap_ratio() == 0);
}
