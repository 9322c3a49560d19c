// SPDX-License-Identifier: BSL-1.0
#include <gradsync/engine/watch.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <thread>
#include <vector>

#include <gradsync/core/backend_abilities.hpp>

using namespace gradsync;

namespace {

/// A backend of which only the clock is there. It goes by whole seconds, so that sums in double are exact.
struct Clock {
    static constexpr BackendAbilities abilities{.clock = true};
    double seconds = 0;
    double now() const { return seconds; }
};

Observer::Time at_second(int seconds) { return Observer::Time(std::chrono::seconds(seconds)); }

constexpr Activity reduces = Activity::collective, gathers = Activity::gather;

struct Watched {
    Clock clock;
    detail::Watch watch{detail::BackendClock(clock), nullptr};

    void arrive_at(int seconds, Activity activity, std::size_t index) {
        clock.seconds = seconds;
        watch.arrive(activity, index);
    }
    /// The time that the step was held up, in ticks of the clock.
    double ticks() { return std::round(watch.take_exposed_seconds() * std::chrono::steady_clock::period::den); }
    double covered_at(int seconds) {
        clock.seconds = seconds;
        return watch.take_covered_seconds();
    }
};

using Ticks = std::chrono::steady_clock;

Ticks::time_point at(int tick) { return Ticks::time_point(Ticks::duration(tick)); }

}  // namespace

TEST_CASE("Watch: time counts while something is on its way, once") {
    Watched w;
    w.watch.depart(reduces, 0, at_second(10));
    w.watch.depart(reduces, 1, at_second(12));
    w.arrive_at(15, reduces, 0);
    w.watch.depart(reduces, 2, at_second(16));
    w.arrive_at(17, reduces, 1);
    w.arrive_at(20, reduces, 2);
    w.watch.depart(reduces, 3, at_second(30));  // between 20 and 30 there was nothing
    w.arrive_at(31, reduces, 3);
    CHECK(w.covered_at(40) == 11);
    CHECK(w.covered_at(50) == 0);
}

TEST_CASE("Watch: what is on its way when it is asked counts up to then, and from then on") {
    Watched w;
    w.watch.depart(gathers, 0, at_second(10));
    CHECK(w.covered_at(13) == 3);
    CHECK(w.covered_at(14) == 1);
    w.arrive_at(20, gathers, 0);
    CHECK(w.covered_at(30) == 6);
}

TEST_CASE("Watch counts a start that is noted after another thread has seen the last arrival") {
    Watched w;
    w.watch.depart(reduces, 0, at_second(10));
    // A thread starts bucket 1 at 12, and is held up before it notes that.
    w.arrive_at(15, reduces, 0);
    w.watch.depart(reduces, 1, at_second(12));
    w.arrive_at(18, reduces, 1);
    CHECK(w.covered_at(20) == 8);
}

TEST_CASE("Watch: a step is held up by spans, until their end or the end of their scope") {
    Watched w;
    w.clock.seconds = 10;
    {
        auto held = w.watch.hold(Activity::finish);
        w.clock.seconds = 12;
        held.end();
        w.clock.seconds = 15;  // is not counted
    }
    {
        const auto held = w.watch.hold(Activity::wait);
        w.clock.seconds = 16;
        const auto told = w.watch.tell(Activity::launch, 0, at_second(15));
    }
    CHECK(w.watch.take_exposed_seconds() == 3);
    CHECK(w.watch.take_exposed_seconds() == 0);
}

TEST_CASE("Watch: spans one after the other add up") {
    Watched w;
    w.watch.add(at(10), at(15));
    w.watch.add(at(15), at(16));
    w.watch.add(at(20), at(30));
    CHECK(w.ticks() == 16);
    CHECK(w.ticks() == 0);
    w.watch.add(at(40), at(41));
    CHECK(w.ticks() == 1);
}

TEST_CASE("Watch: what several threads do at once counts once") {
    Watched w;
    w.watch.add(at(10), at(20));
    w.watch.add(at(12), at(18));
    w.watch.add(at(15), at(25));
    CHECK(w.ticks() == 15);
}

TEST_CASE("Watch never counts more than went by, from any number of threads") {
    constexpr int threads = 4, spans = 2000;
    Watched w;
    std::vector<std::thread> running;
    for (int t = 0; t < threads; ++t)
        running.emplace_back([&w, t] {
            for (int i = 1; i <= spans; ++i) w.watch.add(at(10 * i), at(10 * i + 5 + t));
        });
    for (std::thread& thread : running) thread.join();
    const double sum = w.ticks();
    CHECK(sum > 0);
    CHECK(sum <= spans * (5 + threads - 1));
}
