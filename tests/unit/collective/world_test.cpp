// SPDX-License-Identifier: BSL-1.0
#include <gradsync/collective/world.hpp>

#include <doctest/doctest.h>

#include <string>
#include <thread>
#include <vector>

using gradsync::Errc;
using gradsync::collective::World;
using gradsync::detail::Shared;

TEST_CASE("World: the first failure counts, and is whole") {
    World shared(4, Shared<World::State>::make());
    CHECK(!shared.failed());
    std::vector<std::thread> threads;
    for (int r = 0; r < 4; ++r)
        threads.emplace_back([&, r] { shared.fail({Errc::timeout, r, std::string(1000, static_cast<char>('a' + r))}); });
    for (std::thread& thread : threads) thread.join();
    REQUIRE(shared.failed());
    const auto failure = shared.failure();
    CHECK(failure.code == Errc::timeout);
    CHECK(failure.message == std::string(1000, static_cast<char>('a' + failure.culprit)));
    shared.fail({Errc::peer_left, 9, "later"});
    CHECK(shared.failure().culprit == failure.culprit);
}

TEST_CASE("World: if the rank that writes the failure dies, one of those that wait writes theirs, and it is whole") {
    for (int round = 0; round < 10; ++round) {
        const auto state = Shared<World::State>::make();
        state->failed = 1;  // somebody was about to write it
        World shared(4, state);
        std::vector<std::thread> threads;
        for (int r = 0; r < 4; ++r)
            threads.emplace_back([&, r] { shared.fail({Errc::timeout, r, std::string(1000, static_cast<char>('a' + r))}); });
        for (std::thread& thread : threads) thread.join();
        REQUIRE(shared.failed());
        CHECK(state->failed == 4);  // written once
        CHECK(shared.failure().message == std::string(1000, static_cast<char>('a' + shared.failure().culprit)));
    }
}
