// SPDX-License-Identifier: BSL-1.0
// ctest: TIMEOUT 60
#include <gradsync/bootstrap/tcp_rendezvous.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "support/ports.hpp"
#include "support/says.hpp"

using namespace std::chrono_literals;
using gradsync::Errc;
using gradsync::TcpRendezvous;
using gradsync::net::Clock;
using gradsync::net::Socket;

namespace {

struct Attempt {
    int code = 0;
    std::string text;  ///< of the error, or ""
    int peer = -1;
};

Attempt attempt(gradsync::Job job, std::chrono::nanoseconds limit = 20s, const std::string& bind = {}) {
    try {
        TcpRendezvous rendezvous(std::move(job), {.timeout = limit, .bind = bind});
        (void)rendezvous.all_gather({});
        return {};
    } catch (const gradsync::Error& error) {
        return {static_cast<int>(error.errc()), error.what(), error.context().peer};
    }
}

bool says(const Attempt& a, const std::string& words) { return gradsync_test::says(a.text, words); }
bool is(const Attempt& a, Errc code) { return a.code == static_cast<int>(code); }

/// Somebody who has reached the port.
Socket stranger(std::uint16_t port) {
    std::string problem;
    const auto deadline = Clock::now() + 10s;
    while (Clock::now() < deadline) {
        const gradsync::net::Addresses addresses = gradsync::net::resolve("127.0.0.1", port, 0, problem);
        for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
            Socket socket = Socket::of_family(at->ai_family);
            if (socket.connect(at->ai_addr, at->ai_addrlen, deadline)) return socket;
        }
        std::this_thread::sleep_for(1ms);
    }
    return {};
}

/// Was the stranger turned away?
bool is_hung_up(const Socket& socket) {
    char word;
    const auto deadline = Clock::now() + 10s;
    while (socket.receive_all(&word, 1, deadline)) {
    }
    return errno != ETIMEDOUT;
}

}  // namespace

TEST_CASE("TcpRendezvous: strangers are turned away, and keep nobody from meeting") {
    const std::uint16_t port = gradsync_test::free_port();
    std::vector<Attempt> results(2);
    std::vector<std::thread> ranks;
    ranks.emplace_back([&] { results[0] = attempt({.rank = 0, .size = 2, .port = port, .token = "right"}); });

    const Socket silent = stranger(port);
    const auto send = [&](std::string_view words) {
        Socket socket = stranger(port);
        const bool sent = socket.send_all(words.data(), words.size(), Clock::now() + 10s);
        CHECK((sent || words.size() > 1000));  // who says that much may be turned away in the middle of it
        return socket;
    };
    CHECK(is_hung_up(send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")));
    CHECK(is_hung_up(send(std::string(100'000, 'x'))));
    CHECK(is_hung_up(send(std::string(1, '\0'))));
    // As a rank would, up to some byte; then with every 32-bit word of it changed to the largest.
    struct {
        std::uint64_t magic = 0x31636e7973646172u;
        std::uint32_t version = 1, size = 2, rank = 1, token_bytes = 5;
        char token[8] = "wrong";
    } hello;
    const std::string good(reinterpret_cast<const char*>(&hello), 24 + 5);
    std::vector<Socket> half;
    for (const std::size_t bytes : {1u, 8u, 12u, 24u, 27u}) half.push_back(send(std::string_view(good).substr(0, bytes)));
    for (const std::size_t word : {2u, 3u, 4u, 5u}) {
        std::string bad = good;
        for (std::size_t i = 0; i < 4; ++i) bad[4 * word + i] = '\xff';
        CHECK(is_hung_up(send(bad)));
    }
    CHECK(is_hung_up(send(good)));  // the wrong token

    ranks.emplace_back([&] { results[1] = attempt({.rank = 1, .size = 2, .port = port, .token = "right"}); });
    for (std::thread& rank : ranks) rank.join();
    CHECK(results[0].text == "");
    CHECK(results[1].text == "");
}

TEST_CASE("TcpRendezvous: a rank of another job, and one that is there already, are told so; the others meet all the same") {
    const std::uint16_t port = gradsync_test::free_port();
    Attempt first, third, twins[2];
    std::atomic<int> over{0};
    std::vector<std::thread> ranks;
    ranks.emplace_back([&] { first = attempt({.rank = 0, .size = 3, .port = port, .token = "right"}); });

    const Attempt other = attempt({.rank = 2, .size = 3, .port = port, .token = "wrong"});
    CHECK(is(other, Errc::invalid_argument));
    CHECK(says(other, "another job listens at localhost:" + std::to_string(port)));
    CHECK(says(other, "GRADSYNC_JOB_TOKEN"));

    for (Attempt& twin : twins)
        ranks.emplace_back([&] {
            twin = attempt({.rank = 1, .size = 3, .port = port, .token = "right"});
            ++over;
        });
    while (over == 0) std::this_thread::sleep_for(1ms);
    third = attempt({.rank = 2, .size = 3, .port = port, .token = "right"});
    for (std::thread& rank : ranks) rank.join();
    CHECK(first.text == "");
    CHECK(third.text == "");
    const bool was_first = twins[0].text.empty();
    CHECK(twins[was_first ? 0 : 1].text == "");
    CHECK(says(twins[was_first ? 1 : 0], "rank 1 has arrived already; give every process another RANK"));
}

TEST_CASE("TcpRendezvous: ranks that were told different world sizes all hear of it") {
    const std::uint16_t port = gradsync_test::free_port();
    Attempt first, second;
    std::thread rank_0([&] { first = attempt({.rank = 0, .size = 2, .port = port}); });
    second = attempt({.rank = 1, .size = 3, .port = port});
    rank_0.join();
    for (const Attempt& a : {first, second})
        CHECK(says(a, "rank 1 was told that there are 3 ranks, rank 0 that there are 2; give all the same WORLD_SIZE"));
    CHECK(is(first, Errc::parameter_mismatch));
    CHECK(first.peer == 1);
}

TEST_CASE("TcpRendezvous: who did not arrive is said to all who did") {
    const std::uint16_t port = gradsync_test::free_port();
    std::vector<Attempt> results(4);
    std::vector<std::thread> ranks;
    for (const int rank : {0, 1, 3})
        ranks.emplace_back(
            [&, rank] { results[static_cast<std::size_t>(rank)] = attempt({.rank = rank, .size = 4, .port = port}, 1500ms); });
    for (std::thread& rank : ranks) rank.join();
    CHECK(is(results[0], Errc::timeout));
    CHECK(results[0].peer == 2);
    for (const std::size_t r : {0u, 1u, 3u})
        CHECK(says(results[r], "rank 2 did not arrive at localhost:" + std::to_string(port) + " within 1.5 s"));
}

TEST_CASE("TcpRendezvous: rank 0 is not there") {
    const Attempt a = attempt({.rank = 1, .size = 2, .port = gradsync_test::free_port()}, 200ms);
    CHECK(is(a, Errc::timeout));
    CHECK(a.peer == 0);
    CHECK(says(a, "rank 0 was not to be reached at localhost:"));
    CHECK(says(a, "Connection refused"));
    CHECK(says(attempt({.rank = 1, .size = 2, .address = "no.such.host.invalid"}, 200ms), "no.such.host.invalid:29500"));
}

TEST_CASE("TcpRendezvous: the port is another's") {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    const Socket other = gradsync::net::listen(reinterpret_cast<const sockaddr*>(&name), sizeof name, 4);
    const std::uint16_t port = gradsync::net::port_of(other);
    const Attempt a = attempt({.rank = 0, .size = 2, .address = "127.0.0.1", .port = port});
    CHECK(is(a, Errc::invalid_argument));
    CHECK(says(a, "port " + std::to_string(port) + " is in use"));

    // A server of something else, as a rank meets it.
    std::thread server([&] {
        const Socket caller = other.accept(Clock::now() + 10s);
        const std::string words = "HTTP/1.1 400 Bad Request\r\n\r\n";
        (void)caller.send_all(words.data(), words.size(), Clock::now() + 10s);
        char rest[64];
        (void)caller.receive_all(rest, sizeof rest, Clock::now() + 1s);
    });
    const Attempt b = attempt({.rank = 1, .size = 2, .address = "127.0.0.1", .port = port});
    server.join();
    CHECK(says(b, "is no rank 0 of gradsync"));
}

TEST_CASE("TcpRendezvous: whoever takes a call and hangs up is not rank 0, which is called again") {
    std::string problem;
    Socket other = gradsync::net::listen("127.0.0.1", 0, 4, problem);
    const std::uint16_t port = gradsync::net::port_of(other);
    std::vector<Attempt> results(2);
    std::thread caller([&] { results[1] = attempt({.rank = 1, .size = 2, .address = "127.0.0.1", .port = port}); });
    for (int i = 0; i < 2; ++i) CHECK(other.accept(Clock::now() + 10s));
    other = {};
    results[0] = attempt({.rank = 0, .size = 2, .address = "127.0.0.1", .port = port});
    caller.join();
    for (const Attempt& result : results) CHECK(result.text == "");
}

TEST_CASE("Socket: nobody is called who is the caller itself") {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const Socket socket = Socket::of_family(AF_INET);
    REQUIRE(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name) == 0);
    name.sin_port = htons(gradsync::net::port_of(socket));
    CHECK(!socket.connect(reinterpret_cast<const sockaddr*>(&name), sizeof name, Clock::now() + 1s));
    CHECK(errno == ECONNREFUSED);
}

TEST_CASE("TcpRendezvous: rank 0 binds where it is told") {
    CHECK(says(attempt({.rank = 0, .size = 2, .port = gradsync_test::free_port()}, 1s, "192.0.2.1"), "cannot listen at '192.0.2.1'"));
    const std::uint16_t port = gradsync_test::free_port();
    Attempt first;
    std::thread rank_0([&] { first = attempt({.rank = 0, .size = 2, .port = port}, 20s, "127.0.0.1"); });
    CHECK(attempt({.rank = 1, .size = 2, .address = "127.0.0.1", .port = port}).text == "");
    rank_0.join();
    CHECK(first.text == "");
}

TEST_CASE("TcpRendezvous: what cannot be meant is refused") {
    CHECK(says(attempt({.rank = 2, .size = 2}), "rank 2 is not one of 2"));
    CHECK(says(attempt({.rank = 0, .size = 0}), "rank 0 is not one of 0"));
    CHECK(says(attempt({.rank = 0, .size = 2}, -1s), "time limit must be positive"));
    CHECK(says(attempt({.rank = 0, .size = 2, .token = std::string(257, 'x')}), "longer than 256 bytes"));
}
