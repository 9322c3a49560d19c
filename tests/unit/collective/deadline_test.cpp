// SPDX-License-Identifier: BSL-1.0
#include <gradsync/collective/deadline.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <thread>

using gradsync::collective::Deadline;
using namespace std::chrono_literals;

TEST_CASE("deadline: says how long ago it saw its limit pass, and looks at who is there now and then") {
    Deadline deadline;
    int liveness_checks = 0, alarms = 0;
    std::chrono::nanoseconds by{}, last{};
    const auto look = [&] {
        deadline.look(
            20ms,
            [&](std::chrono::nanoseconds late) {
                ++alarms;
                last = by;
                by = late;
            },
            [&] { ++liveness_checks; });
    };
    CHECK(!deadline.begun());
    look();
    CHECK(deadline.begun());
    CHECK(alarms == 0);
    CHECK(liveness_checks == 0);
    while (alarms == 0) {
        std::this_thread::sleep_for(1ms);
        look();
    }
    CHECK(by == 0ns);  // however late it was seen
    CHECK(liveness_checks >= 1);
    std::this_thread::sleep_for(1ms);
    look();
    CHECK(alarms == 2);
    CHECK(by >= 1ms);
    CHECK(last == 0ns);
}

TEST_CASE("deadline: a pause between two looks is no waiting, except for a sixteenth of the limit") {
    Deadline deadline;
    int alarms = 0;
    for (int i = 0; i < 5; ++i) {
        deadline.look(
            160ms, [&](std::chrono::nanoseconds) { ++alarms; }, [] {});
        std::this_thread::sleep_for(170ms);
    }
    CHECK(alarms == 0);
}

TEST_CASE("deadline: it counts from the last data that moved between machines") {
    Deadline deadline;
    int alarms = 0;
    const auto look = [&](std::uint64_t moved) {
        deadline.look(
            60ms, [&](std::chrono::nanoseconds) { ++alarms; }, [] {}, moved);
        std::this_thread::sleep_for(1ms);
    };
    std::uint64_t moved = 0;
    for (const auto until = std::chrono::steady_clock::now() + 200ms; std::chrono::steady_clock::now() < until;) look(++moved);
    CHECK(alarms == 0);
    for (int i = 0; i < 1000 && alarms == 0; ++i) look(moved);
    CHECK(alarms == 1);
}

TEST_CASE("deadline: the shortest limit passes, too") {
    Deadline deadline;
    int alarms = 0;
    for (int i = 0; i < 100 && alarms == 0; ++i) {
        deadline.look(
            1ns, [&](std::chrono::nanoseconds) { ++alarms; }, [] {});
        std::this_thread::sleep_for(1ms);
    }
    CHECK(alarms == 1);
}

TEST_CASE("deadline: who may wait for one that waits leaves the others a twentieth of the limit a stage") {
    CHECK(Deadline::too_early(0s, 20s));
    CHECK(Deadline::too_early(999ms, 20s));
    CHECK(!Deadline::too_early(1s, 20s));
    CHECK(Deadline::too_early(1s, 20s, 2));
    CHECK(!Deadline::too_early(2s, 20s, 2));
    CHECK(Deadline::too_early(249ms, 1s));  // a short limit leaves time enough all the same
    CHECK(!Deadline::too_early(250ms, 1s));
}

TEST_CASE("deadline: whoever only lately keeps all from going on is not suspected, but in the end somebody is") {
    constexpr std::chrono::nanoseconds limit = 1ms;
    Deadline deadline;
    bool lately = true;
    const auto looks_until = [&](auto suspect) {
        const auto start = std::chrono::steady_clock::now();
        lately = true;
        for (int i = 0;; ++i) {
            deadline.look(
                limit, [&](std::chrono::nanoseconds) { lately = deadline.is_recent_suspect(suspect(i), limit); }, [] {});
            if (!lately) return std::chrono::steady_clock::now() - start;
            std::this_thread::sleep_for(1ms);
        }
    };
    CHECK(looks_until([](int) { return 1; }) >= 250ms);
    CHECK(looks_until([](int) { return 2; }) >= 250ms);  // another one
    deadline = {};
    CHECK(looks_until([](int i) { return i % 2; }) >= 1s);  // another one at each look, until 2 s after the limit
}

TEST_CASE("deadline: data that moves all the time extends a wait to sixteen limits, and no further") {
    Deadline deadline;
    std::chrono::nanoseconds by{-1};
    const auto begin = std::chrono::steady_clock::now();
    for (std::uint64_t moved = 1; moved < 5000 && by < 10ms; ++moved, std::this_thread::sleep_for(1ms))
        deadline.look(
            20ms, [&](std::chrono::nanoseconds late) { by = late; }, [] {}, moved);
    CHECK(by >= 10ms);
    CHECK(std::chrono::steady_clock::now() - begin >= 330ms);
}
