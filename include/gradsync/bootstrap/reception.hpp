// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "../core/clock.hpp"
#include "socket.hpp"

namespace gradsync::inline v0_2::net {

/// The address at which others of the job can call a process. Plain bytes, to be sent to all.
struct Contact {
    std::uint64_t token = 0;  ///< proves that the right process is called: the same address may mean another machine elsewhere
    std::uint16_t port = 0;   ///< 0: cannot be called
    std::uint16_t count = 0;
    std::array<std::array<std::uint8_t, 16>, 8> hosts{};  ///< IPv6, or IPv4 mapped into it
};
static_assert(std::is_trivially_copyable_v<Contact>);

namespace detail {

struct Greeting {
    std::uint64_t token;
    std::int64_t number;
};
inline constexpr char welcome = 'y';

inline std::array<std::uint8_t, 16> mapped(const in_addr& address) noexcept {
    std::array<std::uint8_t, 16> bytes{};
    bytes[10] = bytes[11] = 0xff;
    std::memcpy(bytes.data() + 12, &address, 4);
    return bytes;
}
inline bool is_mapped(const std::array<std::uint8_t, 16>& bytes) noexcept {
    const auto ipv4 = mapped({});
    return std::memcmp(bytes.data(), ipv4.data(), 12) == 0;
}

/// Adds this machine's addresses that others may reach; loopback only if there is nothing else.
inline void add_hosts(Contact& contact) {
    const auto add = [&](const std::array<std::uint8_t, 16>& host) {
        if (contact.count < contact.hosts.size()) contact.hosts[contact.count++] = host;
    };
    ifaddrs* first = nullptr;
    if (::getifaddrs(&first) == 0) {
        for (const int family : {AF_INET, AF_INET6})
            for (const ifaddrs* it = first; it != nullptr; it = it->ifa_next) {
                if (it->ifa_addr == nullptr || it->ifa_addr->sa_family != family || !(it->ifa_flags & IFF_UP) ||
                    (it->ifa_flags & IFF_LOOPBACK))
                    continue;
                if (family == AF_INET) {
                    add(mapped(reinterpret_cast<const sockaddr_in*>(it->ifa_addr)->sin_addr));
                } else {
                    const in6_addr& address = reinterpret_cast<const sockaddr_in6*>(it->ifa_addr)->sin6_addr;
                    if (IN6_IS_ADDR_LINKLOCAL(&address)) continue;  // only valid on its own link
                    std::array<std::uint8_t, 16> host;
                    std::memcpy(host.data(), &address, host.size());
                    add(host);
                }
            }
        ::freeifaddrs(first);
    }
    if (contact.count == 0) add(mapped({htonl(INADDR_LOOPBACK)}));
}

}  // namespace detail

/// Takes calls from processes that know this one's `Contact`, and turns all others away.
class Reception {
public:
    Reception() = default;

    /// Begins to listen, on all of this machine's networks. If that fails, `contact().port` is 0.
    static Reception open() {
        Reception reception;
        sockaddr_in6 any6{};
        any6.sin6_family = AF_INET6;
        reception.listener_ = listen(reinterpret_cast<const sockaddr*>(&any6), sizeof any6, backlog);
        if (!reception.listener_) {
            sockaddr_in any{};
            any.sin_family = AF_INET;
            reception.listener_ = listen(reinterpret_cast<const sockaddr*>(&any), sizeof any, backlog);
        }
        if (!reception.listener_) return reception;
        std::random_device random;
        reception.contact_.token = (static_cast<std::uint64_t>(random()) << 32) | random();
        reception.contact_.port = port_of(reception.listener_);
        detail::add_hosts(reception.contact_);
        return reception;
    }

    explicit operator bool() const noexcept { return static_cast<bool>(listener_); }
    const Contact& contact() const noexcept { return contact_; }
    void close() noexcept { listener_ = {}; }

    /// Returns a call, and the number that the caller gave, if `expects(number)`; no socket at the deadline.
    template <class Expects>
    std::pair<Socket, std::int64_t> answer(Clock::time_point deadline, Expects&& expects) const {
        while (listener_) {
            Socket caller = listener_.accept(deadline);
            if (!caller) break;
            detail::Greeting greeting{};
            // Callers greet at once; a stranger must not keep the others waiting.
            if (caller.receive_all(&greeting, sizeof greeting, Clock::now() + std::chrono::milliseconds(500)) &&
                greeting.token == contact_.token && expects(greeting.number) && caller.send_all(&detail::welcome, 1, deadline)) {
                caller.send_without_delay();
                return {std::move(caller), greeting.number};
            }
        }
        return {};
    }

private:
    static constexpr int backlog = 128;

    Socket listener_;
    Contact contact_;
};

/// Calls a process, and introduces this one as `number`. Tries each address for up to `limit`, so that an unreachable one takes no time
/// from the others. Returns no socket if none answers.
inline Socket call(const Contact& contact, std::int64_t number, std::chrono::milliseconds limit) {
    for (std::size_t i = 0; i < contact.count && i < contact.hosts.size() && contact.port != 0; ++i) {
        const auto deadline = Clock::now() + limit;
        const auto& host = contact.hosts[i];
        sockaddr_in6 name6{};
        sockaddr_in name{};
        const bool ipv4 = detail::is_mapped(host);
        if (ipv4) {
            name.sin_family = AF_INET;
            name.sin_port = htons(contact.port);
            std::memcpy(&name.sin_addr, host.data() + 12, 4);
        } else {
            name6.sin6_family = AF_INET6;
            name6.sin6_port = htons(contact.port);
            std::memcpy(&name6.sin6_addr, host.data(), host.size());
        }
        Socket socket = Socket::of_family(ipv4 ? AF_INET : AF_INET6);
        const detail::Greeting greeting{contact.token, number};
        char answer = 0;
        if (socket &&
            socket.connect(ipv4 ? reinterpret_cast<const sockaddr*>(&name) : reinterpret_cast<const sockaddr*>(&name6),
                           ipv4 ? socklen_t{sizeof name} : socklen_t{sizeof name6}, deadline) &&
            socket.send_all(&greeting, sizeof greeting, deadline) && socket.receive_all(&answer, 1, deadline) &&
            answer == detail::welcome) {
            socket.send_without_delay();
            return socket;
        }
    }
    return {};
}

/// A connection to a rank.
struct Link {
    int rank;
    Socket socket;
};

/// Connects this rank with the ranks `called`, which it calls at their contacts, and with the `callers`, which call `reception`, up to
/// `limit`. Tries each address for up to `limit_each`. Returns the connections that could be made.
inline std::vector<Link> connect(const Reception& reception, std::span<const Contact> contacts, int rank, const std::vector<int>& called,
                                 std::vector<int> callers, std::chrono::nanoseconds limit, std::chrono::milliseconds limit_each) {
    std::vector<Link> links, heard;
    links.reserve(called.size() + callers.size());
    heard.reserve(callers.size());
    const auto answer = [&, deadline = Clock::now() + limit] {
        while (!callers.empty()) {
            auto [socket, caller] = reception.answer(
                deadline, [&](std::int64_t number) { return std::find(callers.begin(), callers.end(), number) != callers.end(); });
            if (!socket) return;
            std::erase(callers, caller);
            heard.push_back({static_cast<int>(caller), std::move(socket)});
        }
    };
    std::thread answering;  // calls and answers must not wait for each other
    try {
        answering = std::thread(answer);
    } catch (const std::system_error&) {  // no thread can be started: this rank answers after its calls
    }
    for (const int r : called)
        if (Socket socket = call(contacts[static_cast<std::size_t>(r)], rank, limit_each)) links.push_back({r, std::move(socket)});
    if (answering.joinable()) answering.join();
    else answer();
    for (Link& link : heard) links.push_back(std::move(link));
    return links;
}

}  // namespace gradsync::inline v0_2::net
