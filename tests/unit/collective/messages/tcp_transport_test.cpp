// SPDX-License-Identifier: BSL-1.0
// ctest: COST 16
// What tcp_transport.hpp does with messages that come before anybody receives them; the conformance suites over TcpBackend show the rest.
#include <gradsync/collective/messages/tcp_transport.hpp>

#include <doctest/doctest.h>

#include <sys/ioctl.h>
#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gradsync/bootstrap/tcp_rendezvous.hpp>

#include "support/forked.hpp"
#include "support/no_descriptors.hpp"
#include "support/ports.hpp"

using gradsync::message_passing::TcpTransport;
using gradsync::message_passing::Transport;
using namespace std::chrono_literals;
using Bytes = std::vector<std::byte>;

namespace {

constexpr std::size_t large = 150'000;  // more than is copied without a thought, and less than a socket holds

/// Ranks 0 and 1 of a world of two.
struct Pair {
    static gradsync::List<gradsync::net::Socket> end(int rank, int descriptor) {
        gradsync::List<gradsync::net::Socket> sockets(2);
        sockets[static_cast<std::size_t>(1 - rank)] = gradsync::net::Socket(descriptor);
        return sockets;
    }
    static std::pair<int, int> connected() {
        int ends[2] = {-1, -1};
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
        const int room = 1 << 20;
        for (const int descriptor : ends) ::setsockopt(descriptor, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
        return {ends[0], ends[1]};
    }
    static std::pair<int, int> over_tcp() {
        namespace net = gradsync::net;
        const net::Socket listener = net::listen(gradsync_test::loopback(0), 1);
        net::Socket caller = gradsync_test::stranger(net::address_of(listener).port());
        net::Socket called = listener.accept(net::Clock::now() + 10s);
        return {caller.release(), called.release()};
    }
    explicit Pair(std::pair<int, int> ends = connected()) : to_one(ends.second), zero(end(0, ends.first), 0), one(end(1, ends.second), 1) {}

    /// Bytes that rank 1 has not read.
    std::size_t waiting() const {
        int bytes = 0;
        REQUIRE(::ioctl(to_one, FIONREAD, &bytes) == 0);
        return static_cast<std::size_t>(bytes);
    }

    int to_one;
    TcpTransport zero, one;
};

Bytes filled(std::size_t size, int value) { return Bytes(size, static_cast<std::byte>(value)); }

bool arrives(Transport& transport, Transport::Ticket& ticket) {
    for (const auto until = std::chrono::steady_clock::now() + 10s; std::chrono::steady_clock::now() < until; transport.poll())
        if (transport.finish_one(ticket)) return true;
    return false;
}

}  // namespace

TEST_CASE("TcpTransport: a rank without file descriptors is named, and not a firewall") {
    const std::uint16_t port = gradsync_test::free_port();
    const auto reports = gradsync_test::forked(2, [&](int rank) -> std::string {
        gradsync::TcpRendezvous meeting({.rank = rank, .size = 2, .port = port}, {.timeout = 20s});
        std::optional<gradsync_test::NoDescriptors> limit;
        if (rank == 1) limit.emplace();
        (void)gradsync::message_passing::make_tcp_transport(meeting, 1s);
        return "connected";
    });
    for (const auto& report : reports) {
        INFO(report.text);
        CHECK(report.says("rank 1 has no file descriptors left"));
    }
}

namespace {

/// A meeting after which rank 3 finds the others behind a firewall that drops packets: a listener whose queue is full.
struct Behind : gradsync::TcpRendezvous {
    Behind(gradsync::Job job, gradsync::TcpRendezvousOptions options, gradsync::net::Address at)
        : TcpRendezvous(std::move(job), options), firewall(at) {}
    std::vector<gradsync::Blob> all_gather(std::span<const std::byte> own) {
        auto all = TcpRendezvous::all_gather(own);
        gradsync::net::Contact contact;
        for (std::size_t r = 0; rank() == 3 && own.size() == sizeof contact && r < 3; ++r) {
            std::memcpy(&contact, all[r].data(), sizeof contact);
            contact.count = 1;
            contact.addresses[0] = firewall;
            std::memcpy(all[r].data(), &contact, sizeof contact);
        }
        return all;
    }
    gradsync::net::Address firewall;
};

}  // namespace

namespace {

/// A meeting in which rank 1 says that it cannot reach a rank that does not exist.
struct Liar : gradsync::TcpRendezvous {
    using TcpRendezvous::TcpRendezvous;
    std::vector<gradsync::Blob> all_gather(std::span<const std::byte> own) {
        const std::int32_t finding[] = {1'000'000, 0};
        return TcpRendezvous::all_gather(rank() == 1 && own.size() == sizeof finding ? std::as_bytes(std::span(finding)) : own);
    }
};

}  // namespace

TEST_CASE("TcpTransport: a rank that does not exist is not named") {
    const std::uint16_t port = gradsync_test::free_port();
    const auto reports = gradsync_test::forked(2, [&](int rank) -> std::string {
        Liar meeting({.rank = rank, .size = 2, .port = port}, {.timeout = 20s});
        (void)gradsync::message_passing::make_tcp_transport(meeting, 4s);
        return "connected";
    });
    for (const auto& report : reports) CHECK(report.text == "connected");
}

TEST_CASE("TcpTransport: a rank that reaches no other gives up in time, and every rank names the network") {
    const gradsync::net::Address loopback = gradsync_test::loopback(0);
    const gradsync::net::Socket listener = gradsync::net::Socket::of_family(AF_INET);
    REQUIRE(::bind(listener.get(), loopback.get(), loopback.size()) == 0);
    REQUIRE(::listen(listener.get(), 0) == 0);
    const gradsync::net::Address firewall = gradsync::net::address_of(listener);
    std::vector<gradsync::net::Socket> queue(4);
    for (gradsync::net::Socket& caller : queue) {
        caller = gradsync::net::Socket::of_family(AF_INET);
        REQUIRE(caller.connect(firewall.get(), firewall.size()));
    }
    const std::uint16_t port = gradsync_test::free_port();
    const auto reports = gradsync_test::forked(4, [&](int rank) -> std::string {
        Behind meeting({.rank = rank, .size = 4, .port = port}, {.timeout = 20s}, firewall);
        try {
            (void)gradsync::message_passing::make_tcp_transport(meeting, 4s);
        } catch (const gradsync::Error& error) {
            return std::to_string(error.context().peer) + " is to blame: " + error.what();
        }
        return "connected";
    });
    for (const auto& report : reports) {
        INFO(report.text);
        CHECK(report.says("3 is to blame: ranks 0 and 3 cannot reach one another over TCP within 2 s"));
    }
}

namespace {

/// A meeting at which the last rank of three dies in the middle of its calls, or is silent from then on: it has called the ranks below
/// `reached`, and no other.
struct Dying : gradsync::TcpRendezvous {
    Dying(int reached_, bool silent_, gradsync::Job job)
        : TcpRendezvous(std::move(job), {.timeout = 2s}), reached(reached_), silent(silent_) {}
    template <class... Limit>
    std::vector<gradsync::Blob> all_gather(std::span<const std::byte> own, Limit... limit) {
        namespace net = gradsync::net;
        net::Contact contact;
        const bool are_contacts = own.size() == sizeof contact;
        if (!are_contacts && rank() == 1) std::this_thread::sleep_for(150ms);  // it may be slow to say what it misses
        if (!are_contacts && rank() == 2 && silent) std::this_thread::sleep_for(8s);
        auto all = TcpRendezvous::all_gather(own, limit...);
        if (!are_contacts || rank() != 2) return all;
        std::string problem;
        listener = net::listen("127.0.0.1", 0, 1, problem);
        Bytes& called = all[static_cast<std::size_t>(reached)];
        std::memcpy(&contact, called.data(), sizeof contact);
        contact.count = 1;
        contact.addresses[0] = net::address_of(listener);
        std::memcpy(called.data(), &contact, sizeof contact);
        std::thread([this] {
            if (listener.accept(net::Clock::now() + 20s) && !silent) ::_exit(0);
        }).detach();
        return all;
    }
    int reached;
    bool silent;
    gradsync::net::Socket listener;
};

/// What the three ranks say. The limit of the rendezvous is 2 s.
std::vector<gradsync_test::Report> reports_of_dying(int reached, bool silent, std::chrono::nanoseconds timeout) {
    const std::uint16_t port = gradsync_test::free_port();
    return gradsync_test::forked(3, [&](int rank) -> std::string {
        try {
            Dying meeting(reached, silent, {.rank = rank, .size = 3, .port = port});
            (void)gradsync::message_passing::make_tcp_transport(meeting, timeout);
            return "connected";
        } catch (const gradsync::Error& error) {
            return "blames rank " + std::to_string(error.context().peer) + ": " + error.what();
        }
    });
}

}  // namespace

TEST_CASE("TcpTransport: a rank that dies among its calls is blamed, and not one that waits for it") {
    for (const auto timeout : {2s, 4s}) {  // of the connections; the second is longer than that of an exchange
        const auto reports = reports_of_dying(1, false, timeout);
        for (const int rank : {0, 1}) {
            CAPTURE(timeout.count());
            INFO(reports[static_cast<std::size_t>(rank)].text);
            CHECK(reports[static_cast<std::size_t>(rank)].says("blames rank 2: "));
        }
    }
}

TEST_CASE("TcpTransport: one limit holds for the connections and for what the ranks say of them") {
    const auto reports = reports_of_dying(0, true, 2s);  // the first half passes in waits for a call, on ranks 0 and 1
    for (const int rank : {0, 1}) {
        INFO(reports[static_cast<std::size_t>(rank)].text);
        // Ranks that a busy machine delays are still connecting when their second ends.
        CHECK((reports[static_cast<std::size_t>(rank)].says("rank 2 did not answer within 1 s") ||
               reports[static_cast<std::size_t>(rank)].says("blames rank 2: ranks ")));
        CHECK(reports[static_cast<std::size_t>(rank)].says("within 1 s"));
    }
}

TEST_CASE("TcpTransport: ranks bind where they are told; who cannot is named") {
    for (const std::string where : {"lo", "127.0.0.1", "no-such-net"}) {
        CAPTURE(where);
        const std::uint16_t port = gradsync_test::free_port();
        const auto reports = gradsync_test::forked(2, [&](int rank) -> std::string {
            gradsync::TcpRendezvous meeting({.rank = rank, .size = 2, .port = port}, {.timeout = 20s});
            (void)gradsync::message_passing::make_tcp_transport(meeting, 20s, rank == 1 ? where : std::string("127.0.0.1"));
            return "connected";
        });
        for (const auto& report : reports) {
            INFO(report.text);
            CHECK((where == "no-such-net") == report.says("rank 1 cannot listen for connections"));
        }
        CHECK((where == "no-such-net") == reports[1].says("at 'no-such-net': "));
    }
}

TEST_CASE("TcpTransport: the system asks hosts that are quiet whether they are there, and gives up within 10 s") {
    Pair pair(Pair::over_tcp());
    const auto option = [&](int level, int name) {
        int value = 0;
        socklen_t size = sizeof value;
        CHECK(::getsockopt(pair.to_one, level, name, &value, &size) == 0);
        return value;
    };
    CHECK(option(SOL_SOCKET, SO_KEEPALIVE) == 1);
    CHECK(option(IPPROTO_TCP, TCP_KEEPIDLE) + option(IPPROTO_TCP, TCP_KEEPCNT) * option(IPPROTO_TCP, TCP_KEEPINTVL) < 10);
    CHECK(option(IPPROTO_TCP, TCP_USER_TIMEOUT) == 0);  // a rank that is stopped would be taken for gone, as soon as its buffer is full
}

TEST_CASE("TcpTransport: a rank that reads nothing is there, and a message for it waits") {
    Pair pair(Pair::over_tcp());
    const Bytes sent = filled(TcpTransport::largest_message, 7);
    for (int i = 0; i < 20; ++i) (void)pair.zero.send(1, 3, sent.data(), sent.size());
    auto out = pair.zero.send(1, 3, sent.data(), sent.size());
    for (const auto until = std::chrono::steady_clock::now() + 11s; std::chrono::steady_clock::now() < until;
         std::this_thread::sleep_for(5ms)) {
        pair.zero.poll();
        if (pair.zero.lost(1)) break;
    }
    CHECK(!pair.zero.lost(1));
    CHECK(!pair.zero.finish_one(out));
}

TEST_CASE("TcpTransport: a large message that comes early goes where its receive wants it, whenever that begins") {
    for (const bool late : {false, true}) {  // at once, or when patience has ended and it was copied
        Pair pair;
        const Bytes sent = filled(large, 7);
        Bytes got = filled(large, 0);
        auto out = pair.zero.send(1, 3, sent.data(), sent.size());
        REQUIRE(arrives(pair.zero, out));
        CHECK(!pair.one.poll());
        CHECK(pair.waiting() == large);
        for (const auto until = std::chrono::steady_clock::now() + 10s;
             late && pair.waiting() != 0 && std::chrono::steady_clock::now() < until;)
            pair.one.poll();
        CHECK(pair.waiting() == (late ? 0 : large));
        auto in = pair.one.receive(0, 3, got.data(), got.size());
        REQUIRE(arrives(pair.one, in));
        CHECK(got == sent);
    }
}

TEST_CASE("TcpTransport: nobody who waits for what is behind it waits for the receive of a large message") {
    Pair pair;
    const Bytes sent = filled(large, 7), behind = filled(100, 8);
    Bytes got = filled(large, 0), got_behind = filled(100, 0);
    auto out = pair.zero.send(1, 3, sent.data(), sent.size()), out_behind = pair.zero.send(1, 4, behind.data(), behind.size());
    REQUIRE(arrives(pair.zero, out));
    REQUIRE(arrives(pair.zero, out_behind));
    auto in_behind = pair.one.receive(0, 4, got_behind.data(), got_behind.size());
    REQUIRE(arrives(pair.one, in_behind));
    CHECK(got_behind == behind);
    auto in = pair.one.receive(0, 3, got.data(), got.size());
    REQUIRE(arrives(pair.one, in));
    CHECK(got == sent);
}

TEST_CASE("TcpTransport: patience ends once for all that has come") {
    Pair pair;
    const Bytes first = filled(large, 7), second = filled(large + 1, 8);
    Bytes got_first = filled(large, 0), got_second = filled(large + 1, 0);
    auto out_first = pair.zero.send(1, 3, first.data(), first.size()), out_second = pair.zero.send(1, 3, second.data(), second.size());
    REQUIRE(arrives(pair.zero, out_first));
    REQUIRE(arrives(pair.zero, out_second));
    pair.one.poll();
    CHECK(pair.waiting() > 2 * large);
    std::this_thread::sleep_for(5ms);
    pair.one.poll();
    CHECK(pair.waiting() == 0);
    auto in_first = pair.one.receive(0, 3, got_first.data(), got_first.size()),
         in_second = pair.one.receive(0, 3, got_second.data(), got_second.size());
    REQUIRE(arrives(pair.one, in_first));
    REQUIRE(arrives(pair.one, in_second));
    CHECK(got_first == first);
    CHECK(got_second == second);
}

TEST_CASE("TcpTransport: what a rank has sent before it was lost is received, large messages that came early, too") {
    auto ends = Pair::connected();
    TcpTransport one(Pair::end(1, ends.second), 1);
    const Bytes sent = filled(large, 7);
    Bytes got = filled(large, 0);
    {
        TcpTransport zero(Pair::end(0, ends.first), 0);
        auto out = zero.send(1, 3, sent.data(), sent.size());
        REQUIRE(arrives(zero, out));
        one.poll();
    }
    CHECK(!one.lost(0));  // there is something to be read
    auto in = one.receive(0, 3, got.data(), got.size());
    REQUIRE(arrives(one, in));
    CHECK(got == sent);
    for (const auto until = std::chrono::steady_clock::now() + 10s; !one.lost(0) && std::chrono::steady_clock::now() < until;) one.poll();
    CHECK(one.lost(0));
}

namespace {

/// Rank 0 is a stranger who writes to rank 1 what it likes.
struct Stranger {
    std::pair<int, int> ends = Pair::connected();
    gradsync::net::Socket zero{ends.first};
    TcpTransport one{Pair::end(1, ends.second), 1};

    void write(std::uint32_t stream, std::uint32_t bytes) const {
        const std::uint32_t header[] = {stream, bytes};
        REQUIRE(::send(zero.get(), header, sizeof header, MSG_NOSIGNAL) == sizeof header);
    }
    /// What rank 1 says, within a time that is ample where it has to.
    std::string refusal(std::chrono::milliseconds limit = 20s) {
        try {
            for (const auto until = std::chrono::steady_clock::now() + limit; std::chrono::steady_clock::now() < until;) one.poll();
        } catch (const gradsync::message_passing::Nonsense& error) {
            return error.rank == 0 ? error.what() : "another rank is blamed";
        }
        return "";
    }
};

}  // namespace

TEST_CASE("TcpTransport: a header of a stranger takes no memory, and one that no rank sends ends the connection") {
    for (const auto& [stream, bytes] : {std::pair<std::uint32_t, std::uint32_t>{(1u << 20) + 1, 8}, {3, 1u << 30}, {~0u, ~0u}}) {
        Stranger stranger;
        stranger.write(stream, bytes);
        CHECK(stranger.refusal().find("rank 0 sent a message with an invalid stream or length") == 0);
        CHECK(stranger.one.lost(0));
    }
    rusage before{}, after{};
    ::getrusage(RUSAGE_SELF, &before);
    Stranger stranger;
    stranger.write(1u << 20, 0);  // the last stream
    CHECK(stranger.refusal(200ms).empty());
    ::getrusage(RUSAGE_SELF, &after);
    CHECK(after.ru_maxrss - before.ru_maxrss < 30'000);  // KiB
}

TEST_CASE("TcpTransport: a message that is longer than its receive is an error that names the rank") {
    for (const bool early : {false, true}) {
        Stranger stranger;
        Bytes room = filled(4, 0);
        if (!early) (void)stranger.one.receive(0, 3, room.data(), room.size());
        stranger.write(3, 5);
        REQUIRE(::send(stranger.zero.get(), "12345", 5, MSG_NOSIGNAL) == 5);
        std::string said;
        try {
            if (early) {
                said = stranger.refusal(200ms);  // kept by now
                (void)stranger.one.receive(0, 3, room.data(), room.size());
            }
            if (said.empty()) said = stranger.refusal();
        } catch (const gradsync::message_passing::Nonsense& error) {
            said = error.what();
        }
        CHECK(said.find("rank 0 sent a message of 5 bytes where 4 were due at most") == 0);
    }
}

TEST_CASE("TcpTransport: messages that nobody asks for are kept up to a bound") {
    Pair pair;
    const Bytes sent = filled(TcpTransport::largest_message, 7);
    std::size_t messages = 0;
    std::string said;
    try {
        for (; messages <= TcpTransport::most_kept / sent.size(); ++messages) {
            auto out = pair.zero.send(1, 3, sent.data(), sent.size());
            while (!pair.zero.finish_one(out)) {
                pair.zero.poll();
                pair.one.poll();
            }
        }
    } catch (const gradsync::message_passing::Nonsense& error) {
        said = error.what();
    }
    CHECK(said.find("rank 0 sent more than 256 MiB that this rank has not asked for") == 0);
    CHECK(messages > 100);
}
