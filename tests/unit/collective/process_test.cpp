// SPDX-License-Identifier: BSL-1.0
#include <gradsync/collective/process.hpp>

#include <doctest/doctest.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

using gradsync::collective::ProcessIdentity;

namespace {

/// A process that does nothing but say who it is.
struct Child {
    pid_t process = -1;
    ProcessIdentity identity;

    Child() {
        int ends[2] = {-1, -1};
        REQUIRE(::pipe(ends) == 0);
        process = ::fork();
        if (process == 0) {
            const ProcessIdentity own = ProcessIdentity::own();
            if (::write(ends[1], &own, sizeof own) < 0) ::_exit(1);
            for (;;) ::pause();
        }
        char bytes[sizeof identity];  // g++ 12 takes &identity for its first member's address
        REQUIRE(::read(ends[0], bytes, sizeof bytes) == sizeof bytes);
        std::memcpy(&identity, bytes, sizeof identity);
        for (const int end : ends) ::close(end);
    }
    void kill() const { ::kill(process, SIGKILL); }
    void bury() const { ::waitpid(process, nullptr, 0); }
};

/// Has the system give the next process this number, if it lets us.
bool reuse(pid_t number) {
    std::FILE* const file = std::fopen("/proc/sys/kernel/ns_last_pid", "w");
    if (file == nullptr) return false;
    std::fprintf(file, "%d", number - 1);
    return std::fclose(file) == 0;
}

}  // namespace

TEST_CASE("ProcessIdentity: a process is alive until it dies, also if nobody waits for it, or if another one has its number") {
    const ProcessIdentity self = ProcessIdentity::own();
    CHECK(self.alive(self));
    const Child first;
    CHECK(first.identity.alive(self));
    first.kill();
    for (int i = 0; i < 20'000 && first.identity.alive(self); ++i) ::usleep(1000);
    CHECK(!first.identity.alive(self));
    first.bury();
    CHECK(!first.identity.alive(self));

    ::usleep(30'000);  // starts are counted in ticks of 10 ms
    if (!reuse(first.process)) return;
    const Child second;
    CHECK(second.identity.alive(self));
    if (second.process == first.process) CHECK(!first.identity.alive(self));
    else MESSAGE("another process took the number");
    second.kill();
    second.bury();
}

TEST_CASE("ProcessIdentity: a process whose main thread has ended is alive until its other threads have") {
    int said[2] = {-1, -1}, hold[2] = {-1, -1};
    REQUIRE(::pipe(said) == 0);
    REQUIRE(::pipe(hold) == 0);
    const pid_t process = ::fork();
    if (process == 0) {
        ::close(hold[1]);
        const ProcessIdentity own = ProcessIdentity::own();
        if (::write(said[1], &own, sizeof own) < 0) ::_exit(1);
        std::thread([end = hold[0]] {
            char word;
            ::_exit(static_cast<int>(::read(end, &word, 1)));
        }).detach();
        ::syscall(SYS_exit, 0);  // as pthread_exit(), which would unwind this test
    }
    ProcessIdentity identity;
    char bytes[sizeof identity];
    REQUIRE(::read(said[0], bytes, sizeof bytes) == sizeof bytes);
    std::memcpy(&identity, bytes, sizeof identity);
    const auto state = [&] {
        std::string number, name;
        char letter = '?';
        std::ifstream("/proc/" + std::to_string(process) + "/stat") >> number >> name >> letter;
        return letter;
    };
    for (int i = 0; i < 20'000 && state() != 'Z'; ++i) ::usleep(1000);
    CHECK(state() == 'Z');
    const ProcessIdentity self = ProcessIdentity::own();
    CHECK(identity.alive(self));
    ::close(hold[1]);
    for (int i = 0; i < 20'000 && identity.alive(self); ++i) ::usleep(1000);
    CHECK(!identity.alive(self));
    ::waitpid(process, nullptr, 0);
    for (const int end : {said[0], said[1], hold[0]}) ::close(end);
}
