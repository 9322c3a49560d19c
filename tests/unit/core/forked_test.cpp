// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/forked.hpp>

#include <doctest/doctest.h>

#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "support/forked.hpp"

namespace {

/// Runs `f()` in a forked child; returns what it returns, 0 to 255.
template <class F>
int in_child(F&& f) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(f());
    int status = -1;
    return child > 0 && ::waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool writes(int descriptor) { return ::write(descriptor, "x", 1) == 1; }

}  // namespace

TEST_CASE("forked children lose what they must not keep, and keep what they open themselves under the same number") {
    int ends[2] = {-1, -1};
    REQUIRE(::pipe(ends) == 0);
    const int kept = ::dup(ends[1]), own = gradsync::detail::keep_from_children(ends[1]);
    CHECK(in_child([&] { return writes(own) ? 1 : 0; }) == 0);
    CHECK(writes(own));
    CHECK(in_child([&] {
              ::close(own);  // as daemons do with all that they inherit
              if (::dup2(kept, own) != own) return 2;
              return in_child([&] { return writes(own) ? 1 : 0; });
          }) == 1);
    gradsync::detail::close_descriptor(own);
    for (const int end : {ends[0], kept}) ::close(end);
}

TEST_CASE("the tests' forked() waits for threads that are about to end") {
    std::atomic<bool> over = false;
    std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        over = true;
    }).detach();
    CHECK(gradsync_test::forked(1, [&](int) -> std::string { return over ? "over" : "not yet"; })[0].text == "over");
}
