// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <memory>

#include "../core/clock.hpp"
#include "../core/list.hpp"
#include "../core/math.hpp"
#include "../core/shared.hpp"
#include "../core/unique_handle.hpp"

/// TCP sockets. None of them blocks without a limit. POSIX; Linux.

namespace gradsync::inline v0_2::net {

using Clock = std::chrono::steady_clock;

/// A host that answers nothing for so long counts as gone. See `keep_alive`.
inline constexpr std::chrono::seconds answer_limit{9};

/// Does the other host, or the network to it, not answer?
constexpr bool is_silence(int error) noexcept {
    return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == ENETDOWN;
}
/// May the same call succeed later?
constexpr bool may_pass(int error) noexcept {
    return error == EAGAIN || error == EINTR || error == ENOBUFS || error == ENOMEM;
}

/// Owns a non-blocking descriptor, which is closed in programs that this one starts and in its forked children.
class Socket : public UniqueHandle<int, gradsync::detail::close_descriptor, -1> {
public:
    Socket() = default;
    explicit Socket(int descriptor) noexcept : UniqueHandle(gradsync::detail::keep_from_children(descriptor)) {}

    static Socket of_family(int family) noexcept {
        return Socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    }

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

    /// Sends all `bytes`. False at the deadline or on an error; `errno` then says why: 0 if the other side has closed.
    [[gnu::cold]] bool send_all(const void* data, std::size_t bytes, Clock::time_point deadline) const noexcept {
        return move_all(const_cast<void*>(data), bytes, POLLOUT, deadline);
    }
    [[gnu::cold]] bool receive_all(void* data, std::size_t bytes, Clock::time_point deadline) const noexcept {
        return move_all(data, bytes, POLLIN, deadline);
    }

    /// Begins to connect. Wait for POLLOUT; then `is_connected()` tells how it ended.
    /// False if it failed; `errno` says why.
    [[gnu::cold]] bool connect(const sockaddr* name, socklen_t size) const noexcept {
        return ::connect(get(), name, size) == 0 || errno == EINPROGRESS || errno == EINTR;
    }
    /// If false, `errno` says why.
    [[gnu::cold]] bool is_connected() const noexcept {
        int error = 0;
        socklen_t length = sizeof error;
        if (::getsockopt(get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) return false;
        errno = error;
        return error == 0 && !has_called_itself();
    }

    /// Has the other side closed, with everything read that it sent?
    [[gnu::cold]] bool has_hung_up() const noexcept {
        char word = 0;
        const ssize_t got = ::recv(get(), &word, 1, MSG_PEEK);
        return got == 0 || (got < 0 && !may_pass(errno));
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

    /// Ends this side's messages, and waits until the other side has closed, so that it has read them all: a close with
    /// unread input makes the system drop data that is still in flight.
    [[gnu::cold]] void end(Clock::time_point deadline) const noexcept {
        char rest[4096];
        ::shutdown(get(), SHUT_WR);
        while (await(POLLIN, deadline) && Clock::now() < deadline && ::recv(get(), rest, sizeof rest, 0) != 0 &&
               (errno == EAGAIN || errno == EINTR || errno == 0))
            errno = 0;
    }

    void set(int level, int option, int value) const noexcept {
        ::setsockopt(get(), level, option, &value, sizeof value);
    }
    /// Disables the delay of small messages.
    void send_without_delay() const noexcept { set(IPPROTO_TCP, TCP_NODELAY, 1); }
    /// Makes the system probe a quiet other end, and declare its host gone if no answer comes for `answer_limit`. The
    /// host of a stopped process still answers.
    void keep_alive() const noexcept {
        set(SOL_SOCKET, SO_KEEPALIVE, 1);
        set(IPPROTO_TCP, TCP_KEEPIDLE, 3);
        set(IPPROTO_TCP, TCP_KEEPINTVL, 2);
        set(IPPROTO_TCP, TCP_KEEPCNT, 3);
    }

private:
    /// Has the system connected this socket to itself? It may give a port without a listener
    /// to the very socket that calls it.
    [[gnu::cold]] bool has_called_itself() const noexcept {
        sockaddr_storage own{}, other{};
        socklen_t size = sizeof own, other_size = sizeof other;
        const bool itself = ::getsockname(get(), reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
                            ::getpeername(get(), reinterpret_cast<sockaddr*>(&other), &other_size) == 0 &&
                            size == other_size && std::memcmp(&own, &other, size) == 0;
        if (itself) errno = ECONNREFUSED;
        return itself;
    }

    /// Sends (POLLOUT) or receives (POLLIN) until all `bytes` have moved.
    [[gnu::cold]] bool move_all(void* data, std::size_t bytes, short events,
                                Clock::time_point deadline) const noexcept {
        for (std::size_t moved = 0; moved != bytes;) {
            std::byte* const next = static_cast<std::byte*>(data) + moved;
            const ssize_t count = events == POLLOUT ? ::send(get(), next, bytes - moved, MSG_NOSIGNAL)
                                                    : ::recv(get(), next, bytes - moved, 0);
            if (count > 0) {
                moved += static_cast<std::size_t>(count);
            } else if (count == 0) {
                errno = 0;
                return false;
            } else if (errno != EINTR) {
                if (errno != EAGAIN) return false;
                if (await(events, deadline)) continue;
                errno = ETIMEDOUT;
                return false;
            }
        }
        return true;
    }
};

/// An IPv4 or IPv6 address with a port. Plain bytes, to be sent.
struct Address {
    sockaddr_in6 name = {};  ///< large enough for IPv4, with the port at the same offset

    Address() = default;
    Address(const sockaddr* at, std::size_t bytes) noexcept {
        std::memcpy(&name, at, gradsync::detail::smaller(bytes, sizeof name));
    }
    const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&name); }
    int family() const noexcept { return name.sin6_family == AF_INET6 ? AF_INET6 : AF_INET; }
    socklen_t size() const noexcept { return family() == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in); }
    /// The port, in the host's byte order.
    std::uint16_t port() const noexcept { return ntohs(name.sin6_port); }
    /// Does it stand for all addresses of this machine?
    bool is_wildcard() const noexcept {
        if (family() == AF_INET6) return IN6_IS_ADDR_UNSPECIFIED(&name.sin6_addr);
        return reinterpret_cast<const sockaddr_in*>(&name)->sin_addr.s_addr == INADDR_ANY;
    }
    void set_port(std::uint16_t port) noexcept { name.sin6_port = htons(port); }
    /// Returns the address as text, without the port.
    [[gnu::cold]] std::string text() const {
        char host[NI_MAXHOST] = "";
        ::getnameinfo(get(), size(), host, sizeof host, nullptr, 0, NI_NUMERICHOST);
        return host;
    }
};

namespace detail {

/// A question to the system's resolver, which may take any time to answer.
struct Question {
    std::string host, port;
    addrinfo hints{};
    List<Address> found;
    int code = 0;
    Socket asker;  ///< closed once there is an answer
    std::atomic<bool> over = false;

    [[gnu::cold]] int ask(int flags) {
        hints.ai_flags = AI_NUMERICSERV | flags;
        addrinfo* first = nullptr;
        code = ::getaddrinfo(host.empty() ? nullptr : host.c_str(), port.c_str(), &hints, &first);
        const UniqueHandle<addrinfo*, ::freeaddrinfo> all(first);
        for (const addrinfo* at = first; at != nullptr; at = at->ai_next)
            found.push_back({at->ai_addr, at->ai_addrlen});
        return code;
    }
};

}  // namespace detail

/// The addresses of a host and port, of both families, as the system resolves them. "localhost" gives IPv4 only, which
/// always exists, so that nobody can answer at the other family's. An empty host means all addresses of this machine,
/// to listen at. `problem` is empty, or says why there are none.
[[gnu::cold]] inline List<Address> resolve(const std::string& host, std::uint16_t port, Clock::time_point deadline,
                                           std::string& problem) {
    using detail::Question;
    const auto question = gradsync::detail::Shared<Question>::make();
    question->host = host;
    question->port = std::to_string(port);
    question->hints.ai_socktype = SOCK_STREAM;
    if (host == "localhost") question->hints.ai_family = AF_INET;
    int ends[2] = {-1, -1};
    // A name server may not answer: a thread asks, and is abandoned at the deadline.
    if (question->ask(AI_PASSIVE | AI_NUMERICHOST) != 0) {
        if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
            problem = std::strerror(errno);
            return {};
        }
        const Socket answer(ends[0]);
        question->asker = Socket(ends[1]);
        const auto run = [](void* argument) -> void* {
            const std::unique_ptr<gradsync::detail::Shared<Question>> own(
                static_cast<gradsync::detail::Shared<Question>*>(argument));
            Question& asked = **own.get();
            asked.ask(0);
            asked.over = true;
            asked.asker = {};
            return nullptr;
        };
        std::unique_ptr<gradsync::detail::Shared<Question>> share(new gradsync::detail::Shared<Question>(question));
        pthread_t thread;
        if (::pthread_create(&thread, nullptr, run, share.get()) == 0) {
            (void)share.release();
            ::pthread_detach(thread);
            answer.await(POLLIN, deadline);
            if (!question->over) {
                problem = "the name server does not answer";
                return {};
            }
        } else {
            question->ask(0);
        }
    }
    problem = question->code == 0 ? "" : ::gai_strerror(question->code);
    return std::move(question->found);
}

/// The addresses of this machine's networks that are up; only those of `interface` if it is not empty. IPv4 first.
[[gnu::cold]] inline List<Address> addresses_of(const std::string& interface) {
    List<Address> found;
    ifaddrs* first = nullptr;
    if (::getifaddrs(&first) != 0) return found;
    const UniqueHandle<ifaddrs*, ::freeifaddrs> all(first);
    for (const int family : {AF_INET, AF_INET6})
        for (const ifaddrs* it = first; it != nullptr; it = it->ifa_next) {
            if (it->ifa_addr == nullptr || it->ifa_addr->sa_family != family || !(it->ifa_flags & IFF_UP)) continue;
            if (interface.empty() ? (it->ifa_flags & IFF_LOOPBACK) != 0 : interface != it->ifa_name) continue;
            // Link-local addresses are valid on their own link only.
            if (family == AF_INET6 &&
                IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(it->ifa_addr)->sin6_addr))
                continue;
            found.push_back({it->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6)});
        }
    return found;
}

/// Listens at `address`. If that fails, returns no socket and sets `errno`. The IPv6 wildcard address serves IPv4 too.
[[gnu::cold]] inline Socket listen(const Address& address, int backlog) noexcept {
    Socket socket = Socket::of_family(address.family());
    if (!socket) return {};
    socket.set(SOL_SOCKET, SO_REUSEADDR, 1);  // reuses a port that was just closed
    if (address.family() == AF_INET6) socket.set(IPPROTO_IPV6, IPV6_V6ONLY, 0);
    if (::bind(socket.get(), address.get(), address.size()) != 0 || ::listen(socket.get(), backlog) != 0) return {};
    return socket;
}

/// Listens at an address of `where`: a host name or address of this machine, or one of its network interfaces; empty
/// means all networks. If that fails, returns no socket and sets `problem`.
[[gnu::cold]] inline Socket listen(const std::string& where, std::uint16_t port, int backlog, std::string& problem) {
    List<Address> addresses = where.empty() ? List<Address>() : addresses_of(where);
    for (Address& address : addresses) address.set_port(port);
    if (addresses.empty()) addresses = resolve(where, port, Clock::now() + std::chrono::seconds(10), problem);
    for (const bool ipv6 : {where.empty(), !where.empty()})  // the IPv6 wildcard address serves both
        for (const Address& at : addresses) {
            if ((at.family() == AF_INET6) != ipv6) continue;
            if (Socket socket = listen(at, backlog)) return socket;
            problem = std::strerror(errno);
            if (errno == EADDRINUSE) return {};  // ranks that prefer this address would call the other listener
        }
    return {};
}

/// The address of a listening socket.
inline Address address_of(const Socket& socket) noexcept {
    Address address;
    socklen_t size = sizeof address.name;
    ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address.name), &size);
    return address;
}

}  // namespace gradsync::inline v0_2::net
