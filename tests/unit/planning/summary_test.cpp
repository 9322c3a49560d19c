// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>

#include <gradsync/planning/summary.hpp>

using namespace gradsync;

namespace {

Observer::Time at_ms(int milliseconds) { return Observer::Time(std::chrono::milliseconds(milliseconds)); }

void last(Timeline& timeline, Activity activity, std::size_t index, int begin, int end) {
    timeline.begin(activity, index, at_ms(begin));
    timeline.end(activity, index, at_ms(end));
}

/// From `t` on: bucket 0 travels under the backward, bucket 1 half of its time.
void step(Timeline& timeline, int t) {
    timeline.ready(1, at_ms(t + 10));
    last(timeline, Activity::launch, 0, t + 10, t + 11);
    last(timeline, Activity::collective, 0, t + 11, t + 20);
    timeline.ready(0, at_ms(t + 18));
    last(timeline, Activity::launch, 1, t + 18, t + 18);
    last(timeline, Activity::collective, 1, t + 18, t + 30);
    last(timeline, Activity::finish, Observer::no_index, t + 24, t + 32);
}

bool near(double a, double b) { return doctest::Approx(a).epsilon(1e-9) == b; }

}  // namespace

TEST_CASE("a summary counts collectives, and what of them held the step up") {
    Timeline timeline;
    BucketPlan plan;
    plan.push_back(std::array<std::size_t, 1>{1});
    plan.push_back(std::array<std::size_t, 1>{0});
    timeline.plan(plan, std::array<std::size_t, 2>{4096, 100}, std::array<std::string_view, 2>{"weight", "bias"});
    for (int s = 0; s < 3; ++s) step(timeline, 100 * s);

    const TimelineSummary summary = summarise(timeline);
    CHECK(summary.steps == 3);
    CHECK(near(summary.exposed_seconds, 9e-3));         // 10-11, 24-32
    CHECK(near(summary.communication_seconds, 19e-3));  // 11-30
    CHECK(summary.dropped == 0);
    REQUIRE(summary.buckets.size() == 2);
    CHECK(summary.buckets[0].bytes == 4096);
    CHECK(summary.buckets[0].count == 3);
    CHECK(near(summary.buckets[0].launch, 1e-3));
    CHECK(near(summary.buckets[0].duration, 9e-3));
    CHECK(near(summary.buckets[0].exposed, 0));
    CHECK(near(summary.buckets[1].launch, 8e-3));
    CHECK(near(summary.buckets[1].duration, 12e-3));
    CHECK(near(summary.buckets[1].exposed, 6e-3));
    bool seen = false;
    for (const SpanSummary& row : summary.spans)
        if (row.name == "collective") {
            seen = true;
            CHECK(row.count == 6);
            CHECK(near(row.total, 63e-3));
            CHECK(near(row.least, 9e-3));
            CHECK(near(row.most, 12e-3));
            CHECK(near(row.mean(), 10.5e-3));
        }
    CHECK(seen);

    const std::string table = describe(summary);
    CHECK(table.find("collective") != std::string::npos);
    CHECK(table.find("3 steps; a step: communication 19.000 ms, exposed 9.000 ms") != std::string::npos);
}

TEST_CASE("a summary counts the buckets of the present plan, and steps with marks") {
    Timeline timeline;
    BucketPlan one, two;
    one.push_back(std::array<std::size_t, 2>{0, 1});
    two.push_back(std::array<std::size_t, 1>{1});
    two.push_back(std::array<std::size_t, 1>{0});
    const std::array<std::string_view, 2> names{"weight", "bias"};
    timeline.plan(one, std::array<std::size_t, 1>{4196}, names);
    last(timeline, Activity::collective, 0, 1, 90);
    last(timeline, Activity::finish, Observer::no_index, 1, 95);
    timeline.plan(two, std::array<std::size_t, 2>{4096, 100}, names);
    step(timeline, 100);
    last(timeline, Activity::collective, 0, 201, 210);  // of a rank without a batch: no marks
    last(timeline, Activity::finish, Observer::no_index, 200, 220);
    last(timeline, Activity::optimizer, 0, 220, 230);
    last(timeline, Activity::gather, 0, 225, 240);

    const TimelineSummary summary = summarise(timeline);
    CHECK(summary.steps == 3);
    REQUIRE(summary.buckets.size() == 2);
    CHECK(summary.buckets[0].count == 2);
    CHECK(near(summary.buckets[0].duration, 9e-3));
    CHECK(near(summary.buckets[0].launch, 1e-3));
    CHECK(near(summary.communication_seconds, (89 + 19 + 9 + 15) / 3.0 * 1e-3));
}

TEST_CASE("a summary of nothing is empty") {
    const TimelineSummary summary = summarise(Timeline());
    CHECK(summary.steps == 0);
    CHECK(summary.spans.empty());
    CHECK(summary.exposed_seconds == 0);
    CHECK(describe(summary).find("0 steps") != std::string::npos);
}
