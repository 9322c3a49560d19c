// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/thread.hpp>

#include <doctest/doctest.h>
#include <pthread.h>

#include <string>
#include <system_error>

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

TEST_CASE("Thread: if the system has no room for a thread, the error says so") {
    pthread_attr_t before, huge;
    REQUIRE(pthread_getattr_default_np(&before) == 0);
    REQUIRE(pthread_getattr_default_np(&huge) == 0);
    REQUIRE(pthread_attr_setstacksize(&huge, std::size_t{1} << 60) == 0);  // more than a process can address
    REQUIRE(pthread_setattr_default_np(&huge) == 0);
    auto run = [] {};
    gradsync::detail::Thread thread;
    std::string what;
    try {
        thread.start(run);
    } catch (const std::system_error& error) {
        what = error.what();
    }
    REQUIRE(pthread_setattr_default_np(&before) == 0);
    CHECK(!thread.joinable());
    CHECK(what.starts_with("gradsync: a thread could not be started; start fewer"));
    pthread_attr_destroy(&huge);
    pthread_attr_destroy(&before);
}
