// SPDX-License-Identifier: BSL-1.0
// What a trace looks like to those who read it is tested with the trainer, by a JSON parser.
#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <string>

#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/core/error.hpp>
#include <gradsync/planning/trace.hpp>

#include "support/ranks.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

Observer::Time at_time(int microseconds) { return Observer::Time(std::chrono::microseconds(microseconds)); }

std::size_t count(const std::string& text, const std::string& part) {
    std::size_t n = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
    return n;
}

}  // namespace

TEST_CASE("a trace has the events of all ranks, counted from the first of them") {
    for (int ranks = 1; ranks <= 4; ++ranks) {
        CAPTURE(ranks);
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  Timeline timeline;
                  const int r = comm.rank();
                  timeline.begin(Activity::collective, 0, at_time(1000 + 10 * r));
                  for (int k = 0; k < r; ++k)
                      timeline.ready(static_cast<std::size_t>(k), at_time(1000 + 20 * r));  // not as long on all ranks
                  timeline.end(Activity::collective, 0, at_time(1000 + 30 * r + 5));
                  const std::string text = collect_trace(comm, timeline, ranks - 1);
                  if (r != ranks - 1) return finding.check(text.empty(), "one that is not the root has a trace");
                  for (int rank = 0; rank < ranks; ++rank) {
                      const std::string pid = "\"pid\":" + std::to_string(rank);
                      finding.check(text.find("\"name\":\"bucket 0\"," + pid +
                                              ",\"tid\":0,\"cat\":\"collective\",\"id2\":{\"local\":\"collective0\"},\"ts\":" +
                                              std::to_string(10 * rank) + ".000,") != std::string::npos,
                                    "no beginning of rank " + std::to_string(rank) + " in " + text);
                      finding.check(text.find(",\"ts\":" + std::to_string(30 * rank + 5) + ".000,") != std::string::npos,
                                    "no end in " + text);
                  }
                  finding.check(count(text, "\"ph\":\"i\"") == static_cast<std::size_t>(ranks * (ranks - 1) / 2), "marks in " + text);
              }) == "");
    }
}

TEST_CASE("names are quoted, and spans of several threads lie in lanes of their own") {
    Timeline timeline;
    timeline.plan({}, {}, std::vector<std::string_view>{"a\"b\\c\n"});
    timeline.begin(Activity::copy, 0, at_time(0));
    timeline.begin(Activity::copy, 1, at_time(1));
    timeline.end(Activity::copy, 0, at_time(2));
    timeline.end(Activity::copy, 1, at_time(3));
    const std::string text = gradsync::detail::trace_events(timeline, 0, at_time(0));
    CHECK(text.find(R"("copy a\"b\\c\u000a","pid":0,"tid":1,)") != std::string::npos);
    CHECK(text.find(R"("copy gradient 1","pid":0,"tid":5,)") != std::string::npos);
}

TEST_CASE("what nests shares a lane, and what was under way is shown") {
    Timeline timeline;
    timeline.add_scope("inner", at_time(12), at_time(14));
    timeline.add_scope("outer", at_time(10), at_time(20));
    timeline.add_scope("other thread", at_time(15), at_time(25));
    timeline.begin(Activity::collective, 3, at_time(16));
    timeline.begin(Activity::finish, Observer::no_index, at_time(17));
    const std::string text = gradsync::detail::trace_events(timeline, 0, at_time(0));
    CHECK(text.find(R"("name":"outer","pid":0,"tid":0,)") != std::string::npos);
    CHECK(text.find(R"("name":"inner","pid":0,"tid":0,)") != std::string::npos);
    CHECK(text.find(R"("name":"other thread","pid":0,"tid":4,)") != std::string::npos);
    CHECK(text.find(R"x({"ph":"b","name":"bucket 3 (unfinished)")x") != std::string::npos);
    CHECK(text.find(R"("ph":"e")") == std::string::npos);
    CHECK(text.find("finish (unfinished)") != std::string::npos);
}

TEST_CASE("names that are no UTF-8 are written as such") {
    Timeline timeline;
    timeline.plan({}, {}, std::vector<std::string_view>{"\xc3\xa9\xff\xc3"});
    timeline.ready(0, at_time(0));
    CHECK(gradsync::detail::trace_events(timeline, 0, at_time(0)).find("\"\xc3\xa9??\"") != std::string::npos);
}

TEST_CASE("a trace that cannot be written is an error that says where") {
    const Timeline timeline;
    try {
        write_trace(timeline, 2, "/nonexistent/trace.json");
        FAIL("no error");
    } catch (const Error& e) {
        CHECK(e.errc() == Errc::storage);
        CHECK(e.context().rank == 2);
        CHECK(std::string(e.what()).find("/nonexistent/trace.json") != std::string::npos);
    }
}

TEST_CASE("a full disk is said to be one, whether it shows when the text is written or only when the file is closed") {
    const std::string full = "/dev/full";
    if (!std::filesystem::exists(full)) {
        MESSAGE("skipped: there is no ", full);
        return;
    }
    for (const int events : {0, 100'000}) {  // what waits in stdio's buffer until the end, and what does not fit there
        CAPTURE(events);
        Timeline timeline;
        for (int k = 0; k < events; ++k) timeline.ready(static_cast<std::size_t>(k), at_time(k));
        const Outcome outcome = outcome_of([&] { write_trace(timeline, 2, full); });
        INFO(outcome.text);
        CHECK(outcome.is(Errc::storage));
        CHECK(outcome.says("cannot write '/dev/full'"));
        CHECK(outcome.says("No space left on device"));
    }
}
