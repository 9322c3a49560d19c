// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <array>

#include "../core/thread.hpp"
#include "rendezvous.hpp"
#include "socket.hpp"

namespace gradsync::inline v0_2::net {

/// The address at which others of the job can call a process. Plain bytes, to be sent to all.
struct Contact {
    std::uint64_t token = 0;  ///< proves that the right process is called: the same address may mean another machine elsewhere
    std::uint16_t port = 0;   ///< 0: cannot be called
    std::uint16_t count = 0;
    std::array<char[INET6_ADDRSTRLEN], 8> hosts{};  ///< addresses as text, of either family
};
static_assert(std::is_trivially_copyable_v<Contact>);

namespace detail {

struct Greeting {
    std::uint64_t token;
    std::int64_t number;
};
inline constexpr char welcome = 'y';

/// Adds this machine's addresses that others may reach; loopback only if there is nothing else.
[[gnu::cold]] inline void add_hosts(Contact& contact) {
    ifaddrs* first = nullptr;
    if (::getifaddrs(&first) == 0) {
        for (const int family : {AF_INET, AF_INET6})
            for (const ifaddrs* it = first; it != nullptr && contact.count < contact.hosts.size(); it = it->ifa_next) {
                if (it->ifa_addr == nullptr || it->ifa_addr->sa_family != family || !(it->ifa_flags & IFF_UP) ||
                    (it->ifa_flags & IFF_LOOPBACK))
                    continue;
                const void* address = &reinterpret_cast<const sockaddr_in*>(it->ifa_addr)->sin_addr;
                if (family == AF_INET6) address = &reinterpret_cast<const sockaddr_in6*>(it->ifa_addr)->sin6_addr;
                // Link-local addresses are only valid on their own link.
                if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(static_cast<const in6_addr*>(address))) continue;
                if (::inet_ntop(family, address, contact.hosts[contact.count], INET6_ADDRSTRLEN) != nullptr) ++contact.count;
            }
        ::freeifaddrs(first);
    }
    if (contact.count == 0) std::strcpy(contact.hosts[contact.count++], "127.0.0.1");
}

}  // namespace detail

/// A connection to a rank.
struct Link {
    int rank = -1;
    Socket socket = {};
};

/// Takes calls from processes that know this one's `Contact`, and turns all others away.
class Reception {
public:
    Reception() = default;

    /// Begins to listen, on all of this machine's networks. If that fails, `contact().port` is 0.
    [[gnu::cold]] static Reception open() {
        Reception reception;
        std::string problem;
        reception.listener_ = listen("", 0, backlog, problem);
        if (!reception.listener_) return reception;
        reception.contact_.token = bootstrap::random_token();
        reception.contact_.port = port_of(reception.listener_);
        detail::add_hosts(reception.contact_);
        return reception;
    }

    const Contact& contact() const noexcept { return contact_; }
    void close() noexcept {
        listener_ = {};
        callers_.clear();
    }

    /// Returns a call of one of the `expected` ranks; no socket at the deadline. A stranger who says nothing keeps nobody waiting.
    [[gnu::cold]] Link answer(Clock::time_point deadline, const List<int>& expected) {
        List<pollfd> waiting;
        for (auto now = Clock::now(); listener_ && now < deadline; now = Clock::now()) {
            callers_.erase_if([&](const Caller& caller) { return caller.until <= now; });
            waiting.clear();
            for (const Caller& caller : callers_) waiting.push_back({caller.socket.get(), POLLIN, 0});
            if (callers_.size() < backlog) waiting.push_back({listener_.get(), POLLIN, 0});
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - now).count();
            ::poll(waiting.data(), waiting.size(), left > 100 ? 100 : static_cast<int>(left));
            for (std::size_t i = 0; i < callers_.size(); ++i) {
                Caller& caller = callers_[i];
                if (waiting[i].revents == 0) continue;
                detail::Greeting& greeting = caller.greeting;
                const ssize_t count =
                    ::recv(caller.socket.get(), reinterpret_cast<std::byte*>(&greeting) + caller.got, sizeof greeting - caller.got, 0);
                caller.got += count > 0 ? static_cast<std::size_t>(count) : 0;
                if (count > 0 && caller.got < sizeof greeting) continue;
                caller.until = now;  // it is heard, or turned away
                for (const int rank : count > 0 && greeting.token == contact_.token ? expected : List<int>())
                    if (rank == greeting.number && caller.socket.send_all(&detail::welcome, 1, deadline)) {
                        caller.socket.send_without_delay();
                        return {rank, std::move(caller.socket)};
                    }
            }
            while (callers_.size() < backlog) {
                Socket caller = listener_.accept({});
                if (!caller) break;
                callers_.push_back({std::move(caller), Clock::now() + patience, {}, 0});
            }
        }
        return {};
    }

private:
    /// A caller who has not said yet who it is.
    struct Caller {
        Socket socket;
        Clock::time_point until;
        detail::Greeting greeting;
        std::size_t got;  ///< bytes of it
    };

    static constexpr int backlog = 128;
    static constexpr std::chrono::seconds patience{5};

    Socket listener_;
    List<Caller> callers_;
    Contact contact_;
};

/// Calls a process, and introduces this one as `number`. Tries each address for up to `limit`, so that an unreachable one takes no time
/// from the others. Returns no socket if none answers.
[[gnu::cold]] inline Socket call(const Contact& contact, std::int64_t number, std::chrono::milliseconds limit) {
    for (std::size_t i = 0; i < contact.count && i < contact.hosts.size() && contact.port != 0; ++i) {
        const auto deadline = Clock::now() + limit;
        std::string problem;
        const std::string host(contact.hosts[i], ::strnlen(contact.hosts[i], INET6_ADDRSTRLEN));
        const Addresses address = resolve(host, contact.port, AI_NUMERICHOST, problem);
        if (!address) continue;
        Socket socket = Socket::of_family(address.get()->ai_family);
        const detail::Greeting greeting{contact.token, number};
        char answer = 0;
        if (socket && socket.connect(address.get()->ai_addr, address.get()->ai_addrlen, deadline) &&
            socket.send_all(&greeting, sizeof greeting, deadline) && socket.receive_all(&answer, 1, deadline) &&
            answer == detail::welcome) {
            socket.send_without_delay();
            return socket;
        }
    }
    return {};
}

/// Connects this rank with the ranks `called`, which it calls at their contacts, and with the `callers`, which call `reception`, up to
/// `limit`. Tries each address for up to `limit_each`. Returns the connections that could be made.
[[gnu::cold]] inline List<Link> connect(Reception& reception, const List<Contact>& contacts, int rank, const List<int>& called,
                                        List<int> callers, std::chrono::nanoseconds limit, std::chrono::milliseconds limit_each) {
    List<Link> links, heard;
    links.reserve(called.size() + callers.size());
    heard.reserve(callers.size());
    auto answer = [&, deadline = Clock::now() + limit] {
        while (!callers.empty()) {
            Link link = reception.answer(deadline, callers);
            if (!link.socket) return;
            callers.erase_if([&](int caller) { return caller == link.rank; });
            heard.push_back(std::move(link));
        }
    };
    gradsync::detail::Thread answering;  // calls and answers must not wait for each other
    try {
        answering.start(answer);
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
