// SPDX-License-Identifier: BSL-1.0
// ctest: TIMEOUT 60
#include <gradsync/bootstrap/reception.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

using namespace std::chrono_literals;
using gradsync::List;
using gradsync::net::Clock;
using gradsync::net::Contact;
using gradsync::net::Link;
using gradsync::net::Reception;
using gradsync::net::Socket;

namespace {

/// Somebody who calls, and says nothing.
Socket silent(std::uint16_t port) {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    name.sin_port = htons(port);
    Socket socket = Socket::of_family(AF_INET);
    REQUIRE(socket.connect(reinterpret_cast<const sockaddr*>(&name), sizeof name, Clock::now() + 10s));
    return socket;
}

}  // namespace

TEST_CASE("Reception: callers who say nothing, or nonsense, keep nobody waiting") {
    Reception reception = Reception::open();
    std::vector<Socket> strangers;
    for (int i = 0; i < 40; ++i) strangers.push_back(silent(reception.contact().port));
    const char nonsense[] = "GET / HTTP/1.1\r\n\r\n";
    CHECK(strangers[7].send_all(nonsense, sizeof nonsense, Clock::now() + 10s));
    Socket called;
    std::thread caller([&] { called = call(reception.contact(), 3, 15s); });
    const auto start = Clock::now();
    const Link link = reception.answer(start + 15s, List<int>{1, 3});
    CHECK(Clock::now() - start < 10s);  // 40 strangers in a row took 20 s
    caller.join();
    CHECK(link.rank == 3);
    CHECK(link.socket);
    CHECK(called);
}

TEST_CASE("Reception: the time limit holds, however many call") {
    Reception reception = Reception::open();
    std::vector<Socket> strangers;
    for (int i = 0; i < 40; ++i) strangers.push_back(silent(reception.contact().port));
    const auto start = Clock::now();
    CHECK(!reception.answer(start + 300ms, List<int>{1}).socket);
    CHECK(Clock::now() - start < 10s);
}

TEST_CASE("Reception: who has another token, or is not expected, is turned away") {
    Reception reception = Reception::open();
    Contact wrong = reception.contact();
    ++wrong.token;
    bool answered[2] = {true, true};
    std::thread callers([&] {
        answered[0] = static_cast<bool>(call(wrong, 1, 200ms));
        answered[1] = static_cast<bool>(call(reception.contact(), 2, 200ms));
    });
    CHECK(!reception.answer(Clock::now() + 2s, List<int>{1}).socket);
    callers.join();
    CHECK(!answered[0]);
    CHECK(!answered[1]);
}
