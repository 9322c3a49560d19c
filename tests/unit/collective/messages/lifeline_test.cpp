// SPDX-License-Identifier: BSL-1.0
#include <gradsync/collective/messages/lifeline.hpp>

#include <doctest/doctest.h>

#include <memory>
#include <thread>
#include <vector>

#include "support/numbers_only.hpp"
#include "support/ports.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

using gradsync::message_passing::Lifeline;
using namespace std::chrono_literals;

namespace {

/// Waits a while for `condition`.
template <class F>
bool soon(F&& condition) {
    for (int i = 0; i < 20000; ++i) {
        if (condition()) return true;
        std::this_thread::sleep_for(1ms);
    }
    return false;
}

struct Ring {
    std::vector<std::unique_ptr<Lifeline>> lifelines;
    gradsync::List<gradsync::net::Contact> addresses;

    explicit Ring(int size) {
        for (int r = 0; r < size; ++r) {
            gradsync_test::NumbersOnly meeting{r, size};
            addresses.push_back(lifelines.emplace_back(std::make_unique<Lifeline>())->listen(meeting, {}));
        }
    }
    template <class Apart>
    void connect(Apart&& apart, std::chrono::milliseconds limit = 20s) {
        std::vector<std::thread> threads;
        for (int r = 0; r < static_cast<int>(lifelines.size()); ++r)
            threads.emplace_back([&, r] {
                lifelines[static_cast<std::size_t>(r)]->connect(r, addresses, {}, limit, [&](int other) { return apart(r, other); });
            });
        for (std::thread& thread : threads) thread.join();
    }
};

const auto everybody = [](int, int) { return true; };

}  // namespace

TEST_CASE("lifeline: every rank has one to two ranks on either side; who says good-bye is not lost") {
    for (const int size : {2, 3, 4, 5, 7}) {
        CAPTURE(size);
        Ring ring(size);
        ring.connect(everybody);
        for (const auto& lifeline : ring.lifelines) CHECK(lifeline->lines() == static_cast<std::size_t>(size == 2 ? 2 : 4));
        for (const auto& lifeline : ring.lifelines)
            for (int r = 0; r < size; ++r) CHECK(!lifeline->lost(r));
        ring.lifelines[1].reset();
        for (int i = 0; i < 20; ++i) {
            std::this_thread::sleep_for(1ms);  // its last words may take a moment to come
            CHECK(!ring.lifelines[0]->lost(1));
        }
    }
}

TEST_CASE("lifeline: ranks that see one another's processes need none") {
    Ring ring(4);
    ring.connect([](int rank, int other) { return rank / 2 != other / 2; });
    // 0 and 1 are together, 2 and 3 are: 0 has lines to 2 (two steps on, and two back), and to 3 (one step back).
    for (const auto& lifeline : ring.lifelines) CHECK(lifeline->lines() == 3);
}

TEST_CASE("lifeline: a process that dies is lost to its neighbours") {
    Ring ring(3);
    int ends[2] = {-1, -1};
    REQUIRE(::pipe(ends) == 0);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        Lifeline own;  // a child has no sockets of its parent
        gradsync_test::NumbersOnly meeting{1, 3};
        ring.addresses[1] = own.listen(meeting, {});
        if (::write(ends[1], &ring.addresses[1], sizeof ring.addresses[1]) < 0) ::_exit(1);
        own.connect(1, ring.addresses, {}, 20s, [](int) { return true; });
        if (::write(ends[1], "c", 1) < 0) ::_exit(1);
        for (int i = 0; i < 20000 && !own.lost(0); ++i) ::usleep(1000);  // lives until the parent's end, or a kill
        ::_exit(0);
    }
    ring.lifelines[1].reset();
    REQUIRE(::read(ends[0], &ring.addresses[1], sizeof ring.addresses[1]) == sizeof ring.addresses[1]);
    std::thread other([&] { ring.lifelines[2]->connect(2, ring.addresses, {}, 20s, [](int) { return true; }); });
    ring.lifelines[0]->connect(0, ring.addresses, {}, 20s, [](int) { return true; });
    other.join();
    char connected = 0;  // whoever dies before that has not been there
    REQUIRE(::read(ends[0], &connected, 1) == 1);
    for (const int end : ends) ::close(end);
    CHECK(ring.lifelines[0]->lines() == 4);
    CHECK(!ring.lifelines[0]->lost(1));
    ::kill(child, SIGKILL);
    CHECK(soon([&] { return ring.lifelines[0]->lost(1); }));
    CHECK(soon([&] { return ring.lifelines[2]->lost(1); }));
    CHECK(ring.lifelines[0]->lost(1));  // for good
    CHECK(!ring.lifelines[0]->lost(2));
    ::waitpid(child, nullptr, 0);
}

TEST_CASE("lifeline: a rank that calls, and gives up when it was admitted already, is not lost") {
    Ring ring(2);
    gradsync::net::Hello hello;
    hello.size = 2;
    hello.from = 1;
    const auto deadline = gradsync::net::Clock::now() + 20s;
    gradsync::net::Channel channel;
    std::thread caller([&] {
        channel = gradsync::net::Channel(gradsync_test::stranger(ring.addresses[0].addresses[0].port()), true);
        CHECK(channel.socket().send_all(&hello, sizeof hello, deadline));
        gradsync::net::Channel::Kind kind{};
        gradsync::Blob words;
        gradsync::net::Nonce challenge;
        REQUIRE(channel.receive(kind, words, deadline) == gradsync::net::Channel::Got::message);
        REQUIRE(words.size() == sizeof challenge);
        std::memcpy(&challenge, words.data(), sizeof challenge);
        const gradsync::net::Hash own = gradsync::net::proof(ring.addresses[0].key({}), 'c', hello, challenge);
        CHECK(channel.socket().send_all(&own, sizeof own, deadline));
    });
    gradsync::List<gradsync::net::Contact> addresses = ring.addresses;
    addresses[1] = {};  // it cannot be called
    ring.lifelines[0]->connect(0, addresses, {}, 20s, [](int) { return true; });
    caller.join();
    CHECK(ring.lifelines[0]->lines() == 1);
    channel = {};  // the welcome came too late
    for (int i = 0; i < 100; ++i) {
        REQUIRE(!ring.lifelines[0]->lost(1));
        std::this_thread::sleep_for(1ms);
    }
}

TEST_CASE("lifeline: strangers, and addresses that lead nowhere, cost the time limit and no more") {
    Ring ring(2);
    // A stranger calls first, with the wrong token.
    const int stranger = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_port = htons(ring.addresses[0].addresses[0].port());
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(::connect(stranger, reinterpret_cast<const sockaddr*>(&name), sizeof name) == 0);
    const char nonsense[16] = "let me in, pls!";
    REQUIRE(::send(stranger, nonsense, sizeof nonsense, MSG_NOSIGNAL) == sizeof nonsense);
    ring.connect(everybody);
    CHECK(ring.lifelines[0]->lines() == 2);
    ::close(stranger);

    Ring deaf(2);
    deaf.addresses[1] = {};
    const auto begun = std::chrono::steady_clock::now();
    deaf.connect(everybody, 3s);
    CHECK(std::chrono::steady_clock::now() - begun < 20s);
    CHECK(deaf.lifelines[0]->lines() == 1);
    CHECK(!deaf.lifelines[0]->lost(1));
}
