// SPDX-License-Identifier: BSL-1.0
#include <gradsync/compress/staged_work.hpp>

#include <doctest/doctest.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace {

/// What has happened, letter by letter.
using StageLog = std::string;

/// Complete when it has been tested so often, or waited for.
struct CountedWork {
    StageLog* log = nullptr;
    int tests = 0;

    bool test() { return tests == 0 || --tests == 0; }
    void wait() {
        if (log != nullptr) *log += 'w';
        tests = 0;
    }
};

/// Writes a, b, c when a collective is complete, and starts the next; the last one starts none.
struct LoggedStage {
    StageLog* log = nullptr;
    char name = 'a';
    char last = 'c';
    bool throws = false;

    bool next(CountedWork& work) {
        if (throws) throw std::runtime_error("no more power");
        *log += name;
        work = name == last ? CountedWork{} : CountedWork{log, 3};
        return name++ != last;
    }
    void drop() noexcept { *log += '!'; }
};

using LoggedWork = gradsync::detail::StagedWork<CountedWork, LoggedStage>;
static_assert(gradsync::Work<LoggedWork>);

}  // namespace

TEST_CASE("StagedWork: tests go through the stages in their order, each once") {
    StageLog log;
    {
        LoggedWork work(CountedWork{&log, 3}, LoggedStage{&log});
        const StageLog after[] = {"", "", "a", "a", "ab"};
        for (const StageLog& expected : after) {
            CHECK(!work.test());
            CHECK(log == expected);
        }
        CHECK(!work.test());
        CHECK(work.test());
        CHECK(log == "abc");
        CHECK(work.test());
        work.wait();
    }
    CHECK(log == "abc");
}

TEST_CASE("StagedWork: a wait goes through all that are left") {
    StageLog log;
    {
        LoggedWork work(CountedWork{&log, 3}, LoggedStage{&log});
        work.wait();
        CHECK(log == "wawbwc");
        CHECK(work.test());
    }
    CHECK(log == "wawbwc");
    log.clear();
    {
        LoggedWork work(CountedWork{&log, 1}, LoggedStage{&log});
        CHECK(!work.test());
        CHECK(log == "a");
        work.wait();
    }
    CHECK(log == "awbwc");
}

TEST_CASE("StagedWork: a last collective that takes time is waited for, too") {
    struct Last : LoggedStage {
        bool next(CountedWork& work) {
            LoggedStage::next(work);
            work = CountedWork{log, 2};
            return false;
        }
    };
    StageLog log;
    gradsync::detail::StagedWork<CountedWork, Last> work(CountedWork{&log, 1}, Last{{&log}});
    CHECK(!work.test());
    CHECK(log == "a");
    CHECK(work.test());
    CHECK(log == "a");
}

TEST_CASE("StagedWork without a next stage ends with its work, and an empty one is complete") {
    StageLog log;
    {
        LoggedWork none;
        CHECK(none.test());
        none.wait();
        LoggedWork alone(CountedWork{&log, 2});
        CHECK(!alone.test());
        CHECK(alone.test());
    }
    CHECK(log == "");
}

TEST_CASE("StagedWork: one that is dropped with more to follow says so once, wherever it was moved") {
    StageLog log;
    { LoggedWork work(CountedWork{&log, 3}, LoggedStage{&log}); }
    CHECK(log == "!");
    log.clear();
    {
        LoggedWork first(CountedWork{&log, 1}, LoggedStage{&log});
        CHECK(!first.test());
        LoggedWork second(std::move(first)), third;
        third = std::move(second);
        CHECK(log == "a");
    }
    CHECK(log == "a!");
    log.clear();
    {
        LoggedWork first(CountedWork{&log, 1}, LoggedStage{&log}), other(CountedWork{&log, 1}, LoggedStage{&log, 'x', 'x'});
        first = std::move(other);  // what it was is dropped, what it becomes is not
        CHECK(log == "!");
        CHECK(first.test());
    }
    CHECK(log == "!x");
}

TEST_CASE("StagedWork: a stage that throws is called again; one that throws to the end is dropped") {
    StageLog log;
    {
        LoggedWork work(CountedWork{&log, 1}, LoggedStage{&log, 'a', 'c', true});
        CHECK_THROWS_AS(work.test(), std::runtime_error);
        CHECK_THROWS_AS(work.wait(), std::runtime_error);
        CHECK(log == "w");
    }
    CHECK(log == "w!");
}
