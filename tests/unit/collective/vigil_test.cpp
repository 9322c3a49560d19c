// SPDX-License-Identifier: BSL-1.0
#include <gradsync/collective/vigil.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <thread>

using gradsync::collective::Vigil;
using namespace std::chrono_literals;

TEST_CASE("vigil: says how long ago it saw its limit pass, and looks at who is there now and then") {
    Vigil vigil;
    int roll_calls = 0, alarms = 0;
    std::chrono::nanoseconds by{}, last{};
    const auto look = [&] {
        vigil.look(
            20ms,
            [&](std::chrono::nanoseconds late) {
                ++alarms;
                last = by;
                by = late;
            },
            [&] { ++roll_calls; });
    };
    CHECK(!vigil.begun());
    look();
    CHECK(vigil.begun());
    CHECK(alarms == 0);
    CHECK(roll_calls == 0);
    std::this_thread::sleep_for(30ms);
    look();
    CHECK(alarms == 1);
    CHECK(by == 0ns);  // however late it was seen
    CHECK(roll_calls == 1);
    std::this_thread::sleep_for(1ms);
    look();
    CHECK(alarms == 2);
    CHECK(by >= 1ms);
    CHECK(last == 0ns);
}

TEST_CASE("vigil: who may wait for one that waits leaves the others a twentieth of the limit a stage") {
    CHECK(Vigil::too_early(0s, 20s));
    CHECK(Vigil::too_early(999ms, 20s));
    CHECK(!Vigil::too_early(1s, 20s));
    CHECK(Vigil::too_early(1s, 20s, 2));
    CHECK(!Vigil::too_early(2s, 20s, 2));
    CHECK(Vigil::too_early(249ms, 1s));  // a short limit leaves time enough all the same
    CHECK(!Vigil::too_early(250ms, 1s));
}
