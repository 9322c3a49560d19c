// SPDX-License-Identifier: BSL-1.0
// Rank 1 of two calls something that answers each call with the bytes of the input, and hangs up.
#include <thread>

#include <gradsync/bootstrap/tcp_rendezvous.hpp>

#include "fuzz.hpp"

static const gradsync_fuzz::Target target("tcp_rendezvous_caller", [](gradsync_fuzz::Input input) {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const address = reinterpret_cast<sockaddr*>(&name);
    socklen_t size = sizeof name;
    const gradsync::net::Socket listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const bool listens = ::bind(listener.get(), address, size) == 0 && ::listen(listener.get(), 100) == 0;
    gradsync_fuzz::check(listens && ::getsockname(listener.get(), address, &size) == 0, "no port");
    std::thread answers([&] {
        for (int call; (call = ::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)) >= 0;) {
            const gradsync::net::Socket caller(call);
            (void)!::send(call, input.data(), input.size(), MSG_NOSIGNAL);
            ::shutdown(call, SHUT_WR);
            char rest[256];
            while (::recv(call, rest, sizeof rest, 0) > 0) {
            }
        }
    });
    try {
        gradsync::TcpRendezvous meeting({.rank = 1, .size = 2, .address = "127.0.0.1", .port = ntohs(name.sin_port), .token = "token"},
                                        {.timeout = std::chrono::milliseconds(5)});
        (void)meeting.all_gather({});
    } catch (const gradsync::Error&) {
    }
    ::shutdown(listener.get(), SHUT_RDWR);  // ends the accepting
    answers.join();
});
