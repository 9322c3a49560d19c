// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <string>

#include <gradsync/gradsync.hpp>
#include <gradsync/observe/timeline.hpp>
#include <gradsync/planning/summary.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/optimizers.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"
#include "support/timelines.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// Gathers count as communication, and moments in which several things are under way count once.
void check_communication(const Timeline& timeline, const Statistics& statistics, Finding& finding) {
    const TimelineSummary summary = summarise(timeline);
    const double in_timeline = summary.communication_seconds * static_cast<double>(summary.steps),
                 counted = statistics.total.communication_seconds;
    finding.check(std::abs(in_timeline - counted) < 1e-6 + 0.01 * counted,
                  "communication: timeline " + std::to_string(in_timeline) + ", statistics " + std::to_string(counted));
}

}  // namespace

TEST_CASE("a sharded training tells of its gathers and of its optimizer") {
    CHECK(findings(3, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({1000, 20, 30'000, 50});
              Timeline timeline;
              ShardedOptimizer<ThreadBackend, AdamW, Zero1, PerParameter> sharded(comm, model, AdamW{{0.01, 0.02}},
                                                                                  {.reducer = {.observer = &timeline}}, PerParameter());
              for (std::size_t i = model.size(); i-- > 0;) {
                  write(sharded.acquire_gradient(i), random_gradient(model[i], comm.rank(), 0, i));
                  sharded.mark_ready(i);
              }
              sharded.finish();
              sharded.step();
              finding.check(count_spans(timeline, Activity::optimizer) == 4 && count_spans(timeline, Activity::gather) == 4 &&
                                count_spans(timeline, Activity::collective) == 4,
                            "stage 1");
              check_communication(timeline, sharded.statistics(), finding);
          }) == "");
    CHECK(findings(3, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({1000, 20, 30'000, 50});
              Timeline timeline;
              ShardedParameters<ThreadBackend, AdamW> sharded(comm, model, AdamW{{0.01, 0.02}}, Units({0, 0, 1, 1}),
                                                              {.reducer = {.observer = &timeline}, .prefetch = 0});
              for (const std::size_t u : {0u, 1u}) const auto use = sharded.gather(u);
              finding.check(count_spans(timeline, Activity::gather) == 2 && count_spans(timeline, Activity::wait) == 2, "stage 3, forward");
              for (const std::size_t i : {3u, 2u, 1u, 0u}) {
                  const auto use = sharded.gather(sharded.unit_of(i));
                  sharded.acquire_gradient(i);
                  sharded.mark_ready(i);
              }
              sharded.finish();
              sharded.step();
              finding.check(count_spans(timeline, Activity::optimizer) == 2 && count_spans(timeline, Activity::collective) == 2,
                            "stage 3, backward");
              check_communication(timeline, sharded.statistics(), finding);
          }) == "");
}
