// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>

#include "../core/clock.hpp"
#include "../core/unique_handle.hpp"

/// TCP sockets; none of them ever blocks without a limit. POSIX; Linux.

namespace gradsync::inline v0_2::net {

using Clock = std::chrono::steady_clock;

/// A host that answers nothing for so long is taken for gone. See `keep_alive`.
inline constexpr std::chrono::seconds answer_limit{9};

/// The other side's host, or the network to it, does not answer.
constexpr bool is_silence(int error) noexcept {
    return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == ENETDOWN;
}
/// The same call may succeed later.
constexpr bool may_pass(int error) noexcept {
    return error == EAGAIN || error == EWOULDBLOCK || error == EINTR || error == ENOBUFS || error == ENOMEM;
}

/// Owns a descriptor that does not block, and is closed in programs that this one starts.
class Socket : public UniqueHandle<int, ::close, -1> {
public:
    using UniqueHandle::UniqueHandle;

    static Socket of_family(int family) noexcept { return Socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

    /// True once the socket is ready for `events` of poll(2), or has failed.
    [[gnu::cold]] bool await(short events, Clock::time_point deadline) const noexcept {
        for (;;) {
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
            pollfd waiting{get(), events, 0};
            const int count = ::poll(&waiting, 1, left <= 0 ? 0 : left > INT_MAX ? INT_MAX : static_cast<int>(left));
            if (count > 0) return true;
            if (count == 0 ? left <= 0 : errno != EINTR) return false;
        }
    }

    /// Sends all `bytes`; false at the deadline or on an error. `errno` then says why: 0 if the other side has closed.
    [[gnu::cold]] bool send_all(const void* data, std::size_t bytes, Clock::time_point deadline) const noexcept {
        return move_all(const_cast<void*>(data), bytes, POLLOUT, deadline);
    }
    [[gnu::cold]] bool receive_all(void* data, std::size_t bytes, Clock::time_point deadline) const noexcept {
        return move_all(data, bytes, POLLIN, deadline);
    }

    /// Connects to `name`; false at the deadline or on an error, and `errno` says why.
    [[gnu::cold]] bool connect(const sockaddr* name, socklen_t size, Clock::time_point deadline) const noexcept {
        if (::connect(get(), name, size) == 0) return !has_called_itself();
        if (errno != EINPROGRESS && errno != EINTR) return false;
        if (!await(POLLOUT, deadline)) {
            errno = ETIMEDOUT;
            return false;
        }
        int error = 0;
        socklen_t length = sizeof error;
        if (::getsockopt(get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) return false;
        errno = error;
        return error == 0 && !has_called_itself();
    }

    /// Returns the next caller, or no socket at the deadline.
    [[gnu::cold]] Socket accept(Clock::time_point deadline) const noexcept {
        while (await(POLLIN, deadline)) {
            Socket caller(::accept4(get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
            if (caller) return caller;
            if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) break;
        }
        return {};
    }

    void set(int level, int option, int value) const noexcept { ::setsockopt(get(), level, option, &value, sizeof value); }
    /// Makes small messages leave at once.
    void send_without_delay() const noexcept { set(IPPROTO_TCP, TCP_NODELAY, 1); }
    /// Makes the system probe a quiet other end, and take its host for gone if no answer comes for `answer_limit`. The host of a process that
    /// is stopped answers.
    void keep_alive() const noexcept {
        set(SOL_SOCKET, SO_KEEPALIVE, 1);
        set(IPPROTO_TCP, TCP_KEEPIDLE, 3);
        set(IPPROTO_TCP, TCP_KEEPINTVL, 2);
        set(IPPROTO_TCP, TCP_KEEPCNT, 3);
    }

private:
    /// A port at which nobody listens may be given to the very socket that calls it, which then answers itself: nobody is there.
    [[gnu::cold]] bool has_called_itself() const noexcept {
        sockaddr_storage own{}, other{};
        socklen_t size = sizeof own, other_size = sizeof other;
        const bool itself = ::getsockname(get(), reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
                            ::getpeername(get(), reinterpret_cast<sockaddr*>(&other), &other_size) == 0 && size == other_size &&
                            std::memcmp(&own, &other, size) == 0;
        if (itself) errno = ECONNREFUSED;
        return itself;
    }

    /// Sends (POLLOUT) or receives (POLLIN) until all `bytes` have moved.
    [[gnu::cold]] bool move_all(void* data, std::size_t bytes, short events, Clock::time_point deadline) const noexcept {
        for (std::size_t moved = 0; moved != bytes;) {
            std::byte* const next = static_cast<std::byte*>(data) + moved;
            const ssize_t count =
                events == POLLOUT ? ::send(get(), next, bytes - moved, MSG_NOSIGNAL) : ::recv(get(), next, bytes - moved, 0);
            if (count > 0) {
                moved += static_cast<std::size_t>(count);
            } else if (count == 0) {
                errno = 0;
                return false;
            } else if (errno != EINTR) {
                if (errno != EAGAIN && errno != EWOULDBLOCK) return false;
                if (await(events, deadline)) continue;
                errno = ETIMEDOUT;
                return false;
            }
        }
        return true;
    }
};

using Addresses = UniqueHandle<addrinfo*, ::freeaddrinfo>;

/// The addresses of a host and port, of both families, as the system resolves them: a list that is linked by `ai_next`. An empty host means
/// all addresses of this machine. `flags`: getaddrinfo's. `problem` is empty, or says why there are none.
[[gnu::cold]] inline Addresses resolve(const std::string& host, std::uint16_t port, int flags, std::string& problem) {
    addrinfo hints{}, *first = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV | flags;
    const int code = ::getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &first);
    problem = code == 0 ? "" : ::gai_strerror(code);
    return Addresses(first);
}

/// Listens at `name`; returns no socket, and sets `errno`, if that fails. The IPv6 wildcard address serves IPv4 too.
[[gnu::cold]] inline Socket listen(const sockaddr* name, socklen_t size, int backlog) noexcept {
    Socket socket = Socket::of_family(name->sa_family);
    if (!socket) return {};
    socket.set(SOL_SOCKET, SO_REUSEADDR, 1);  // reuses a port whose last user has just gone
    if (name->sa_family == AF_INET6) socket.set(IPPROTO_IPV6, IPV6_V6ONLY, 0);
    if (::bind(socket.get(), name, size) != 0 || ::listen(socket.get(), backlog) != 0) return {};
    return socket;
}

/// Listens at an address of `host`; an empty host means all networks of this machine. Returns no socket, and sets `problem`, if that fails.
[[gnu::cold]] inline Socket listen(const std::string& host, std::uint16_t port, int backlog, std::string& problem) {
    const Addresses addresses = resolve(host, port, AI_PASSIVE, problem);
    for (const bool ipv6 : {true, false})  // the IPv6 wildcard address serves both
        for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
            if ((at->ai_family == AF_INET6) != ipv6) continue;
            if (host == "localhost" && ipv6) continue;  // callers try both families, and IPv4 is always available
            if (Socket socket = listen(at->ai_addr, at->ai_addrlen, backlog)) return socket;
            problem = std::strerror(errno);
            if (errno == EADDRINUSE) return {};  // ranks that prefer this address would call whoever listens there
        }
    return {};
}

/// The port of a listening socket, in the host's byte order; 0 on an error.
inline std::uint16_t port_of(const Socket& socket) noexcept {
    sockaddr_storage name{};
    socklen_t size = sizeof name;
    if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&name), &size) != 0) return 0;
    return ntohs(name.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(name).sin6_port
                                            : reinterpret_cast<const sockaddr_in&>(name).sin_port);
}

}  // namespace gradsync::inline v0_2::net
