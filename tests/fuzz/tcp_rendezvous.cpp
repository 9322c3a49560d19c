// SPDX-License-Identifier: BSL-1.0
// A stranger calls rank 0 of two with the bytes of the input; rank 1 comes after it.
#include <thread>

#include <gradsync/bootstrap/tcp_rendezvous.hpp>

#include "fuzz.hpp"
#include "support/ports.hpp"

static const gradsync_fuzz::Target target("tcp_rendezvous", [](gradsync_fuzz::Input input) {
    static const std::uint16_t port = gradsync_test::free_port();
    const auto rank = [](int number) {
        return gradsync::Job{.rank = number, .size = 2, .address = "127.0.0.1", .port = port, .token = "token"};
    };
    const gradsync::TcpRendezvousOptions options{.timeout = std::chrono::milliseconds(500)};
    std::thread first([&] {
        try {
            gradsync::TcpRendezvous meeting(rank(0), options);
            (void)meeting.all_gather({});
        } catch (const gradsync::Error&) {
        }
    });
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_port = htons(port);
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    gradsync::net::Socket stranger;
    for (int tries = 0; tries < 1000; ++tries) {
        stranger = gradsync::net::Socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (::connect(stranger.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name) == 0) break;
        ::sched_yield();
    }
    (void)!::send(stranger.get(), input.data(), input.size(), MSG_NOSIGNAL);
    ::shutdown(stranger.get(), SHUT_WR);
    try {
        gradsync::TcpRendezvous meeting(rank(1), options);
        (void)meeting.all_gather({});
    } catch (const gradsync::Error&) {
    }
    first.join();
});
