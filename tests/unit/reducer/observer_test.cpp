// SPDX-License-Identifier: BSL-1.0
// What an observer is told: the truth, in order, and nothing else.
#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/observe/timeline.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/planning/simulated_backend.hpp>
#include <gradsync/planning/summary.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"
#include "support/timelines.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// Five steps, each looked at by itself.
template <class Overlap>
std::string what_is_wrong(int ranks, GradientStorage storage, const AnyBuckets& buckets, const Overlap& overlap) {
    return findings(ranks, [&](ThreadBackend comm, Finding& finding) {
        auto model = tensors({1000, 20, 30'000, 50});
        Timeline timeline;
        Reducer sync(comm, model, ReducerOptions{.gradients = storage, .observer = &timeline}, buckets, overlap);
        finding.check(timeline.parameter_names().size() == 4 && timeline.bucket_bytes().size() == sync.plan().size(),
                      "the plan was not told");
        for (int step = 0; step < 5; ++step) {
            timeline.clear();
            backward(sync, model, comm.rank(), step);
            (void)sync.finish();
            const auto marks = timeline.marks();
            finding.check(marks.size() == 4, "marks");
            const auto spans = timeline.spans();
            finding.check(count_spans(timeline, Activity::finish) == 1, "finishes");
            const std::size_t collectives = ranks > 1 ? sync.plan().size() : 0;
            finding.check(
                count_spans(timeline, Activity::launch) == collectives && count_spans(timeline, Activity::collective) == collectives,
                "collectives");
            const bool gathers = detail::gathers_in_forward<Overlap>() && ranks > 1;
            finding.check(count_spans(timeline, Activity::gather) == (gathers ? collectives : 0), "gathers");

            std::size_t next = 0;
            for (const Timeline::Span& s : spans) {
                finding.check(s.begin <= s.end, "a span that ends before it begins");
                if (s.activity != Activity::collective) continue;
                finding.check(s.index == next++, "collectives out of order");
                for (const std::size_t i : sync.plan().bucket(s.index))
                    for (const Timeline::Mark& m : marks)
                        finding.check(m.parameter != i || m.at <= s.begin,
                                      "a bucket left before gradient " + std::to_string(i) + " was ready");
            }
            const TimelineSummary summary = summarise(timeline);
            const StepStatistics& last = sync.statistics().last;
            if (!detail::gathers_in_forward<Overlap>()) {  // what the next forward waits for is in the next step's statistics
                finding.check(std::abs(summary.communication_seconds - last.communication_seconds) < 2e-9,
                              "the timeline's communication is not the statistics'");
                finding.check(std::abs(summary.exposed_seconds - last.exposed_seconds) < 1e-6 + 0.01 * last.exposed_seconds,
                              "exposed: timeline " + std::to_string(summary.exposed_seconds) + ", statistics " +
                                  std::to_string(last.exposed_seconds));
            }
        }
    });
}

}  // namespace

TEST_CASE("an observer is told of every mark, launch, collective and finish") {
    for (const int ranks : rank_counts(1, 3))
        CHECK(what_is_wrong(ranks, GradientStorage::in_buckets, PerParameter{}, AnyOverlap(OverlapBackward(Progress::thread))) == "");
    for (const int ranks : rank_counts())
        for (const GradientStorage storage : {GradientStorage::in_buckets, GradientStorage::borrowed}) {
            CAPTURE(ranks);
            CHECK(what_is_wrong(ranks, storage, PerParameter{}, AnyOverlap(OverlapBackward{})) == "");
            CHECK(what_is_wrong(ranks, storage, Flat{}, AnyOverlap(NoOverlap{})) == "");
            CHECK(what_is_wrong(ranks, storage, PerParameter{}, OverlapForward{}) == "");
        }
}

TEST_CASE("a timeline on a simulated cluster is on its clock, and so are the statistics") {
    constexpr std::size_t elements = 1'000'000;
    constexpr plan::Cluster cluster{.ranks = 4, .between = {1e-5, 1e-9}};
    double lasted = 0, exposed = 0, communication = 0, in_timeline = 0;
    run_simulated({.cluster = cluster, .moves_buckets = false}, [&](SimulatedBackend comm) {
        Timeline timeline;
        std::vector<ParameterView> parameters;
        for (int i = 0; i < 2; ++i)
            parameters.push_back({.name = std::to_string(i), .gradient = {nullptr, elements, DType::f32, MemorySpace::host}});
        Reducer<SimulatedBackend, PerParameter> sync(comm, parameters, {.gradients = GradientStorage::in_buckets, .observer = &timeline});
        const double begin = comm.now();
        sync.mark_ready(1);
        comm.compute(2e-3);
        sync.mark_ready(0);
        sync.finish();
        if (comm.rank() != 0) return;
        lasted = comm.now() - begin;
        exposed = sync.statistics().last.exposed_seconds;
        communication = sync.statistics().last.communication_seconds;
        in_timeline = summarise(timeline).exposed_seconds;
    });
    CHECK(lasted > 4e-3);  // it is the wire's: 2 x 4 MB x 2 x 3/4 at 1 ns a byte
    CHECK(exposed == doctest::Approx(lasted - 2e-3).epsilon(1e-4));
    CHECK(communication == doctest::Approx(lasted).epsilon(1e-4));
    CHECK(in_timeline == doctest::Approx(exposed).epsilon(1e-4));
}

TEST_CASE("try_finish tells of a finish once, however often it was called") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({1000, 20});
              Timeline timeline;
              Reducer<ThreadBackend, PerParameter> sync(comm, model, {.observer = &timeline});
              for (int step = 0; step < 3; ++step) {
                  backward(sync, model, comm.rank(), step);
                  if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(5));
                  while (!sync.try_finish()) std::this_thread::yield();
              }
              finding.check(count_spans(timeline, Activity::finish) == 3 && summarise(timeline).steps == 3, "finishes");
          }) == "");
}

TEST_CASE("a gather that has arrived is no communication any more, although nobody has waited for it") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({1000, 20});
              Timeline timeline;
              Reducer<ThreadBackend, PerParameter, OverlapForward> sync(comm, model, {.observer = &timeline});
              backward(sync, model, comm.rank(), 0);
              auto averages = sync.finish();
              averages.acquire(0);
              comm.barrier().wait();  // and so both ranks have started the other one,
              comm.progress();
              comm.barrier().wait();  // and have done their shares of it
              averages.acquire(0);    // it is looked at here
              const auto polled = std::chrono::steady_clock::now();
              comm.barrier().wait();
              averages.wait();
              std::size_t gathers = 0, seen = 0;
              for (const Timeline::Span& s : timeline.spans()) {
                  gathers += s.activity == Activity::gather;
                  seen += s.activity == Activity::gather && s.end <= polled;
              }
              finding.check(gathers == 2 && seen == 2, std::to_string(seen) + " gathers of 2 ended before they were waited for");
              finding.check(sync.statistics().last.collectives == 4 && sync.statistics().last.bytes == 2 * 1020 * 4,
                            "both halves are counted");
          }) == "");
}

TEST_CASE("an observer is told of a new plan, and hears of one gradient for several marks") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({100, 200, 300});
              Timeline timeline;
              Reducer<ThreadBackend, PerParameter> sync(comm, model, {.observer = &timeline});
              for (const std::size_t i : {1u, 0u, 2u}) sync.mark_ready(i);
              sync.finish();
              finding.check(timeline.bucket_bytes()[0] == 1200, "the first plan");
              finding.check(sync.rebuild_buckets(), "no new plan");
              finding.check(timeline.bucket_bytes()[0] == 800 && timeline.plan() == sync.plan(), "the second plan");
              timeline.clear();
              {
                  const auto guard = sync.no_sync();
                  for (const std::size_t i : {1u, 0u, 2u}) sync.mark_ready(i);
              }
              finding.check(timeline.marks().empty() && timeline.spans().empty(), "told under no_sync()");
          }) == "");
}
