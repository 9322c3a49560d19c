// SPDX-License-Identifier: BSL-1.0
// Marks from many threads of one rank.
#include <doctest/doctest.h>

#include <atomic>
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

/// A backward on `count` threads, each of which takes the next gradient, writes and marks it.
template <class R>
void threaded_backward(R& sync, const std::vector<Tensor>& model, int rank, int batch, int count) {
    const auto order = shuffled(model.size(), static_cast<std::uint32_t>(rank * 100 + batch));
    std::atomic<std::size_t> next{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < count; ++t)
        threads.emplace_back([&] {
            for (std::size_t k; (k = next++) < order.size();) {
                const std::size_t i = order[k];
                write(sync.gradient_view(i), random_gradient(model[i], rank, batch, i));
                for (std::uint32_t use = 0; use < model[i].uses; ++use) sync.mark_ready(i);
            }
        });
    for (std::thread& thread : threads) thread.join();
}

template <class Buckets, class Overlap>
void check_threads(ReducerOptions options, Buckets buckets, Overlap overlap) {
    for (const int ranks : rank_counts(1, 3)) {
        CAPTURE(ranks);
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  std::vector<std::size_t> sizes;
                  for (std::size_t i = 0; i < 60; ++i) sizes.push_back(i * 7 % 50);
                  auto model = tensors(sizes);
                  model[5].uses = 3;
                  const int rank = comm.rank();
                  Reducer<ThreadBackend, Buckets, Overlap> sync(comm, model, options, buckets, overlap);
                  for (int step = 0; step < 5; ++step) {
                      if (step > 2 && options.accumulation == Accumulation::in_gradients) {
                          const auto guard = sync.no_sync();
                          threaded_backward(sync, model, rank, 90, 3);
                      }
                      threaded_backward(sync, model, rank, step, 4);
                      sync.finish();
                      finding.check(wrong_mean(sync, model, ranks, step).empty(), wrong_mean(sync, model, ranks, step));
                      finding.check(sync.statistics().steps == static_cast<std::uint64_t>(step + 1), "steps");
                      if (step == 0) (void)sync.rebuild_buckets();
                  }
              }) == "");
    }
}

template <class Overlap>
void check_overlap(Overlap overlap) {
    for (const ReducerOptions& options :
         {ReducerOptions{}, ReducerOptions{.gradients = GradientStorage::in_buckets},
          ReducerOptions{.accumulation = Accumulation::in_buckets}, ReducerOptions{.unused = UnusedParameters::find_unused}}) {
        check_threads(options, PerParameter(), overlap);
        check_threads(options, SizeCappedBuckets(700), overlap);
    }
}

}  // namespace

TEST_CASE("OverlapBackward takes marks from several threads") { check_overlap(OverlapBackward()); }
TEST_CASE("OverlapBackward with a progress thread takes marks from several threads") { check_overlap(OverlapBackward(Progress::thread)); }
TEST_CASE("NoOverlap takes marks from several threads") { check_overlap(NoOverlap()); }

TEST_CASE("one gradient with many uses may be marked from several threads at once") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({100});
              model[0].uses = 400;
              const int rank = comm.rank();
              Reducer<ThreadBackend, PerParameter> sync(comm, model);
              for (int step = 0; step < 3; ++step) {
                  write(sync.gradient_view(0), random_gradient(model[0], rank, step, 0));
                  std::vector<std::thread> threads;
                  for (int t = 0; t < 4; ++t)
                      threads.emplace_back([&] {
                          for (int k = 0; k < 100; ++k) sync.mark_ready(0);
                      });
                  for (std::thread& thread : threads) thread.join();
                  sync.finish();
                  finding.check(wrong_mean(sync, model, 2, step).empty(), wrong_mean(sync, model, 2, step));
              }
          }) == "");
}

TEST_CASE("wrong marks from several threads at once: each is an error, none is a crash") {
    for (const int ranks : {1, 2}) {
        std::atomic<int> refused{0}, strange{0};
        const auto result = outcomes(ranks, [&](ThreadBackend comm) {
            auto model = tensors({10, 20, 30});
            Reducer<ThreadBackend, PerParameter> sync(comm, model);
            std::vector<std::thread> threads;
            for (int t = 0; t < 4; ++t)
                threads.emplace_back([&] {
                    for (int k = 0; k < 50; ++k) {
                        const Outcome outcome = outcome_of([&] { sync.mark_ready(1); });
                        if (outcome.error) ++refused;
                        else if (!outcome.text.empty()) ++strange;
                    }
                });
            for (std::thread& thread : threads) thread.join();
            sync.finish();
        });
        CHECK(strange == 0);
        // The first mark may meet the other rank's failure.
        CHECK(refused >= ranks * (4 * 50 - 1));
        for (const Outcome& outcome : result) {
            INFO(outcome.text);
            CHECK((outcome.is(Errc::gradient_marked_twice) || outcome.is(Errc::peer_failed)));
            CHECK(outcome.says("'p1'"));
        }
    }
}

TEST_CASE("a backward thread may outlive many steps") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({100, 20, 3000});
              const int rank = comm.rank();
              Reducer sync(comm, model, {}, PerParameter(), OverlapBackward(Progress::thread));
              for (int step = 0; step < 200; ++step) {
                  backward(sync, model, rank, step % 7);
                  sync.finish();
                  finding.check(wrong_mean(sync, model, 2, step % 7).empty(), wrong_mean(sync, model, 2, step % 7));
              }
          }) == "");
}
