// SPDX-License-Identifier: BSL-1.0
#include <gradsync/core/thread.hpp>

#include <doctest/doctest.h>

TEST_CASE("Thread: runs a function until it is joined") {
    int runs = 0;
    auto run = [&] { ++runs; };
    gradsync::detail::Thread thread;
    CHECK(!thread.joinable());
    for (int i = 1; i <= 3; ++i) {
        thread.start(run);
        CHECK(thread.joinable());
        thread.join();
        CHECK(!thread.joinable());
        CHECK(runs == i);
    }
}
