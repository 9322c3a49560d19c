// SPDX-License-Identifier: BSL-1.0
#include <gradsync/engine/watch.hpp>

#include <doctest/doctest.h>

#include <thread>
#include <vector>

using gradsync::detail::Exposure;
using Ticks = Exposure::Clock;

namespace {

Ticks::time_point at(int tick) { return Ticks::time_point(Ticks::duration(tick)); }

}  // namespace

TEST_CASE("Exposure: spans one after the other add up") {
    Exposure exposure;
    exposure.add(at(10), at(15));
    exposure.add(at(15), at(16));
    exposure.add(at(20), at(30));
    CHECK(exposure.take() == Ticks::duration(16));
    CHECK(exposure.take() == Ticks::duration(0));
    exposure.add(at(40), at(41));
    CHECK(exposure.take() == Ticks::duration(1));
}

TEST_CASE("Exposure: what several threads do at once counts once") {
    Exposure exposure;
    exposure.add(at(10), at(20));
    exposure.add(at(12), at(18));
    exposure.add(at(15), at(25));
    CHECK(exposure.take() == Ticks::duration(15));
}

TEST_CASE("Exposure: never more than went by, from any number of threads") {
    constexpr int threads = 4, spans = 2000;
    Exposure exposure;
    std::vector<std::thread> running;
    for (int t = 0; t < threads; ++t)
        running.emplace_back([&exposure, t] {
            for (int i = 1; i <= spans; ++i) exposure.add(at(10 * i), at(10 * i + 5 + t));
        });
    for (std::thread& thread : running) thread.join();
    const auto sum = exposure.take();
    CHECK(sum > Ticks::duration(0));
    CHECK(sum <= Ticks::duration(spans * (5 + threads - 1)));
}
