// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <utility>

#include <gradsync/bootstrap/socket.hpp>

namespace gradsync_test {

inline gradsync::net::Address loopback(std::uint16_t port) {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    name.sin_port = htons(port);
    return {reinterpret_cast<const sockaddr*>(&name), sizeof name};
}

/// A port of this machine at which nobody listens. The system gives it to no other program that lets it choose one, as long as this one
/// has not asked for a hundred more.
inline std::uint16_t free_port() {
    static std::mutex mutex;
    static std::deque<gradsync::net::Socket> kept;  // bound; who listens there may reuse the port
    auto socket = gradsync::net::Socket::of_family(AF_INET);
    socket.set(SOL_SOCKET, SO_REUSEADDR, 1);
    const gradsync::net::Address any = loopback(0);
    if (::bind(socket.get(), any.get(), any.size()) != 0) throw std::runtime_error("no port is free");
    const std::uint16_t port = gradsync::net::address_of(socket).port();
    const std::lock_guard lock(mutex);
    kept.push_back(std::move(socket));
    if (kept.size() > 100) kept.pop_front();
    return port;
}

/// Connects with whoever listens at a port of this machine, within ten seconds. `room`: for bytes that it has not read; 0: the system's.
inline gradsync::net::Socket stranger(std::uint16_t port, int room = 0) {
    using gradsync::net::Clock;
    const gradsync::net::Address address = loopback(port);
    const auto deadline = Clock::now() + std::chrono::seconds(10);
    while (Clock::now() < deadline) {
        auto socket = gradsync::net::Socket::of_family(AF_INET);
        if (room != 0) socket.set(SOL_SOCKET, SO_RCVBUF, room);
        if (socket.connect(address.get(), address.size()) && socket.await(POLLOUT, deadline) && socket.is_connected()) return socket;
        ::usleep(1000);
    }
    return {};
}

}  // namespace gradsync_test
