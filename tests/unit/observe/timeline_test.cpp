// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/observe/timeline.hpp>

using namespace gradsync;

namespace {

Observer::Time at(int nanoseconds) { return Observer::Time(std::chrono::nanoseconds(nanoseconds)); }

std::string text_of(const std::vector<Timeline::Span>& spans) {
    std::string text;
    for (const Timeline::Span& s : spans)
        text += (s.name != nullptr ? std::string(s.name) : std::string(name_of(s.activity)) + std::to_string(s.index)) + " " +
                std::to_string(s.begin.time_since_epoch().count()) + "-" + std::to_string(s.end.time_since_epoch().count()) + ";";
    return text;
}

}  // namespace

TEST_CASE("a timeline puts beginnings and ends together, however they overlap") {
    Timeline timeline(64);
    timeline.begin(Activity::collective, 0, at(1));
    timeline.begin(Activity::collective, 1, at(2));
    timeline.begin(Activity::gather, 0, at(3));
    timeline.ready(7, at(4));
    timeline.end(Activity::collective, 1, at(5));
    timeline.end(Activity::collective, 0, at(6));
    timeline.begin(Activity::collective, 0, at(7));
    timeline.end(Activity::gather, 0, at(8));
    timeline.end(Activity::collective, 0, at(9));
    timeline.begin(Activity::finish, Observer::no_index, at(10));  // under way
    CHECK(text_of(timeline.spans()) == "collective0 1-6;collective1 2-5;gather0 3-8;collective0 7-9;");
    CHECK(timeline.spans(true).back().activity == Activity::finish);
    CHECK(!timeline.spans(true).back().finished);
    CHECK(timeline.spans(true).back().end == at(10));
    REQUIRE(timeline.marks().size() == 1);
    CHECK(timeline.marks()[0].parameter == 7);
    CHECK(timeline.marks()[0].at == at(4));
    timeline.end(Activity::finish, Observer::no_index, at(11));
    CHECK(timeline.spans().back().index == Timeline::Span::no_index);
    timeline.clear();
    CHECK(timeline.spans().empty());
}

TEST_CASE("a full timeline keeps what came last") {
    Timeline timeline(5);  // room for 8
    for (int k = 0; k < 10; ++k) {
        timeline.begin(Activity::launch, static_cast<std::size_t>(k), at(10 * k));
        timeline.end(Activity::launch, static_cast<std::size_t>(k), at(10 * k + 1));
    }
    timeline.ready(3, at(200));
    CHECK(timeline.dropped() == 13);
    // Of launch 6 the beginning had to go.
    CHECK(text_of(timeline.spans()) == "launch7 70-71;launch8 80-81;launch9 90-91;");
    CHECK(timeline.marks().size() == 1);
}

TEST_CASE("scopes nest, and one without a timeline is nothing") {
    Timeline timeline;
    {
        const auto outer = timeline.scope("step");
        const auto inner = timeline.scope("forward");
        const Timeline::Scope nothing(nullptr, "nothing");
    }
    const auto spans = timeline.spans();
    REQUIRE(spans.size() == 2);
    CHECK(std::string(spans[0].name) == "step");
    CHECK(std::string(spans[1].name) == "forward");
    CHECK(spans[0].begin <= spans[1].begin);
    CHECK(spans[1].end <= spans[0].end);
}

TEST_CASE("events may come from several threads") {
    constexpr std::size_t threads = 4, each = 1000;
    Timeline timeline(threads * each * 2);
    std::vector<std::thread> running;
    for (std::size_t t = 0; t < threads; ++t)
        running.emplace_back([&, t] {
            for (std::size_t k = 0; k < each; ++k) {
                timeline.begin(Activity::copy, t, at(static_cast<int>(2 * k)));
                timeline.end(Activity::copy, t, at(static_cast<int>(2 * k + 1)));
            }
        });
    for (std::thread& thread : running) thread.join();
    const auto spans = timeline.spans();
    REQUIRE(spans.size() == threads * each);
    std::vector<std::size_t> counts(threads);
    for (const Timeline::Span& s : spans) {
        ++counts[s.index];
        CHECK(s.end - s.begin == std::chrono::nanoseconds(1));
    }
    CHECK(counts == std::vector<std::size_t>(threads, each));
}
