// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/uio.h>

#include "../../bootstrap/reception.hpp"
#include "inboxes.hpp"

namespace gradsync::inline v0_2::message_passing {

/// Messages over TCP connections, one to each other rank. A message that comes before its receive is kept. A rank whose
/// connection has ended is `lost`, and messages to it count as complete.
class TcpTransport final : public Transport {
    using Clock = std::chrono::steady_clock;

public:
    static constexpr std::size_t largest_message = std::size_t{2} << 20;
    /// The most bytes from one rank that are kept until their receives begin. Communicators keep a small part of it.
    static constexpr std::size_t most_kept = std::size_t{256} << 20;

    /// `sockets[r]`: the connection to rank r.
    TcpTransport(List<net::Socket> sockets, int rank) : peers_(sockets.size()) {
        rank_ = rank, size_ = static_cast<int>(peers_.size());
        // Sockets hold several MiB on their way. With fewer rounds a rank waits for another one's next call.
        window = {.rounds = 8, .round_bytes = std::size_t{1} << 20};

        for (std::size_t r = 0; r < sockets.size(); ++r) {
            peers_[r].socket = std::move(sockets[r]);
            peers_[r].socket.keep_alive();
        }
    }

    const char* refusal() const noexcept override { return nullptr; }
    std::mutex& mutex() noexcept override { return mutex_; }
    bool sends_in_poll() const noexcept override { return true; }  // the sockets may be full
    [[gnu::cold]] bool lost(int rank) noexcept override {
        Peer& peer = peers_[rank];
        if (!peer.lost && is_unanswered(peer.socket)) {
            peer.silent = true;
            lose(peer);
        }
        return peer.lost;
    }
    bool silent(int rank) const noexcept override { return peers_[rank].silent; }
    [[gnu::cold]] bool arrived(int rank) const noexcept override {
        const Peer& peer = peers_[rank];
        int bytes = 0;
        return peer.lost || ::ioctl(peer.socket.get(), SIOCOUTQ, &bytes) != 0 || bytes == 0;
    }

    Ticket send(int rank, int stream, const void* data, std::size_t bytes, bool /*known*/ = false) override {
        Peer& peer = peers_[rank];
        const Ticket ticket = tickets_.add(peer.lost);
        if (peer.lost) return ticket;
        const bool first = peer.outgoing.empty();
        peer.outgoing.push({.header = {static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(bytes)},
                            .data = static_cast<std::byte*>(const_cast<void*>(data)),
                            .ticket = ticket});
        if (first) push(peer);
        return ticket;
    }

    Ticket receive(int rank, int stream, void* data, std::size_t room, std::size_t* came = nullptr,
                   std::size_t /*known*/ = 0) override {
        const Ticket ticket = tickets_.add(false);
        Inbox& inbox = inbox_of(rank, stream);
        inbox.posted.push({static_cast<std::byte*>(data), room, ticket, came});
        match(inbox);
        return ticket;
    }

    bool poll() override {
        const std::uint64_t before = over_;
        waiting_.clear();
        for (std::size_t r = 0; r < peers_.size(); ++r) {
            Peer& peer = peers_[r];
            if (peer.incoming.held_up && choose_place(static_cast<int>(r), peer)) pull(static_cast<int>(r));
            const auto events =
                static_cast<short>((peer.incoming.held_up ? 0 : POLLIN) | (peer.outgoing.empty() ? 0 : POLLOUT));
            waiting_.push_back({peer.lost ? -1 : peer.socket.get(), events, 0});
        }
        if (::poll(waiting_.data(), waiting_.size(), 0) > 0)
            for (std::size_t r = 0; r < peers_.size(); ++r) {
                if (waiting_[r].revents & POLLOUT) push(peers_[r]);
                if (waiting_[r].revents & (POLLIN | POLLHUP | POLLERR) && !peers_[r].incoming.held_up)
                    pull(static_cast<int>(r));
            }
        count_moved();
        return over_ != before;
    }

    bool finish(Ticket ticket) override {
        if (!tickets_[ticket]) return false;
        tickets_.remove(ticket);
        return true;
    }

    [[gnu::cold]] bool give_up(Ticket ticket) noexcept override {
        if (tickets_[ticket]) return finish(ticket);
        tickets_[ticket] = true;
        let_go([&](const auto& message) { return message.ticket == ticket; });
        return finish(ticket);
    }
    [[gnu::cold]] bool release(const void* data, std::size_t bytes) noexcept override {
        const auto begin = reinterpret_cast<std::uintptr_t>(data);
        let_go([&](const auto& message) { return reinterpret_cast<std::uintptr_t>(message.data) - begin < bytes; });
        return true;
    }
    [[gnu::cold]] void forget(int first, int last) noexcept override {
        for (Peer& peer : peers_) {
            for (Inbox& inbox : peer.inboxes)
                if (inbox.stream >= first && inbox.stream <= last)
                    for (; !inbox.kept.empty(); inbox.kept.pop()) peer.kept -= cost(inbox.kept.oldest().bytes.size());
            peer.inboxes.forget(first, last);
        }
    }
    bool ends_alone() const noexcept override { return true; }

private:
    struct Header {
        std::uint32_t stream = 0;
        std::uint32_t bytes = 0;
    };
    /// A message in flight, from or to `data`.
    struct Moving {
        Header header = {};
        std::byte* data = nullptr;
        Ticket ticket = no_ticket;
        std::size_t* came = nullptr;
        std::size_t moved = 0;  ///< bytes of header and data together
        List<std::byte> own = {};

        std::size_t all() const noexcept { return sizeof(Header) + header.bytes; }
        /// Continues in memory of its own.
        [[gnu::cold]] void detach() {
            own = List<std::byte>(std::span<const std::byte>(data, header.bytes));
            data = own.data();
            ticket = no_ticket;
            came = nullptr;
        }
    };
    struct Incoming : Moving {
        bool keep = false;     ///< no receive had begun: `own` holds it for a later one
        bool held_up = false;  ///< its header is here, but the rest has no destination yet
    };
    struct Peer {
        net::Socket socket;
        bool lost = false;
        bool silent = false;  ///< the system has given up on its host
        Queue<Moving> outgoing{1};
        Incoming incoming;
        Clock::time_point held_up_since = {};
        bool takes_all = false;  ///< out of patience: nothing is held up until all that has arrived by then is read
        std::size_t kept = 0;    ///< cost of its kept messages
        Inboxes inboxes;
    };

    static constexpr std::size_t max_copied_at_once = std::size_t{128} << 10;
    static constexpr std::chrono::milliseconds patience{1};

    /// Counts sent bytes when they have arrived at the other rank's system: this one may hold many that have not.
    void count_moved() noexcept {
        const auto now = Clock::now();
        if (now < counts_at_) return;
        counts_at_ = now + std::chrono::milliseconds(5);
        std::uint64_t arrived = passed_;
        for (const Peer& peer : peers_) {
            int queued = 0;
            if (!peer.lost && ::ioctl(peer.socket.get(), SIOCOUTQ, &queued) == 0)
                arrived -= detail::smaller(arrived, static_cast<std::uint64_t>(queued));
        }
        moved = detail::larger(moved, arrived);
    }

    void set_over(Ticket ticket) noexcept {
        ++over_;
        if (ticket != no_ticket) tickets_[ticket] = true;
    }

    /// The inbox of the control stream takes messages from any rank.
    Inbox& inbox_of(int rank, int stream) { return stream == control_stream ? control_ : peers_[rank].inboxes[stream]; }

    /// Added to each kept message's bytes, so that empty messages count against the limit, too.
    static constexpr std::size_t cost(std::size_t bytes) noexcept { return bytes + 256; }

    /// Stops listening to a rank that has sent invalid data.
    [[noreturn, gnu::cold]] void refuse(int rank, const auto&... what) {
        lose(peers_[rank]);
        throw Nonsense(rank, text(what...));
    }
    /// Gives a kept message to its receive, if it has begun.
    void match(Inbox& inbox) {
        if (inbox.kept.empty() || inbox.posted.empty()) return;
        Kept message = std::move(inbox.kept.oldest());
        inbox.kept.pop();
        const std::size_t bytes = message.bytes.size();
        const Posted posted = take_posted(message.rank, inbox, bytes);
        if (bytes != 0) std::memcpy(posted.data, message.bytes.data(), bytes);
        if (posted.came != nullptr) *posted.came += bytes;
        peers_[message.rank].kept -= cost(bytes);
        spare_.keep(std::move(message.bytes));
        set_over(posted.ticket);
    }
    /// Takes the oldest begun receive, for a message of `bytes` bytes.
    Posted take_posted(int rank, Inbox& inbox, std::size_t bytes) {
        const Posted posted = inbox.posted.oldest();
        if (bytes > posted.bytes)
            refuse(rank, "a message of ", bytes, " bytes where ", posted.bytes, " were due at most");
        inbox.posted.pop();
        return posted;
    }

    /// Forgets messages. Those that are half sent or half received continue in memory of their own.
    template <class Concerned>
    [[gnu::cold]] void let_go(Concerned&& concerned) noexcept {
        for (Peer& peer : peers_) {
            try {
                // Only the first one can be half sent.
                if (!peer.outgoing.empty() && peer.outgoing.oldest().moved != 0 && concerned(peer.outgoing.oldest()))
                    peer.outgoing.oldest().detach();
                if (concerned(peer.incoming)) peer.incoming.detach();
            } catch (const std::exception&) {  // out of memory
                lose(peer);
            }
            peer.outgoing.erase_if(concerned);
            for (Inbox& inbox : peer.inboxes) inbox.posted.erase_if(concerned);
        }
        control_.posted.erase_if(concerned);
    }

    /// Has the other side's system not acknowledged data for too long? This side would keep retrying
    /// for a quarter of an hour. (TCP_USER_TIMEOUT does not help: it also ends the connection to a stopped
    /// process whose buffer is full.)
    [[gnu::cold]] static bool is_unanswered(const net::Socket& socket) noexcept {
        tcp_info info{};
        socklen_t size = sizeof info;
        return ::getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
               (info.tcpi_unacked != 0 || info.tcpi_probes > 1) &&
               info.tcpi_last_ack_recv >= 1000 * net::answer_limit.count();
    }

    void lose(Peer& peer) noexcept {
        peer.lost = true;
        peer.socket = {};
        stop_sending(peer);
    }

    void push(Peer& peer) noexcept {
        while (!peer.outgoing.empty()) {
            Moving& front = peer.outgoing.oldest();
            constexpr std::size_t header = sizeof(Header);
            const std::size_t of_header = detail::smaller(front.moved, header), of_data = front.moved - of_header;
            iovec parts[] = {{reinterpret_cast<std::byte*>(&front.header) + of_header, header - of_header},
                             {front.data + of_data, front.header.bytes - of_data}};
            msghdr message{};
            message.msg_iov = parts;
            message.msg_iovlen = 2;
            const ssize_t sent = ::sendmsg(peer.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (sent < 0) {
                if (errno == EINTR) continue;
                if (net::may_pass(errno)) return;
                peer.silent |= net::is_silence(errno);
                return stop_sending(peer);
            }
            front.moved += static_cast<std::size_t>(sent);
            if (front.header.stream != control_stream) passed_ += static_cast<std::size_t>(sent);
            if (front.moved < front.all()) continue;
            set_over(front.ticket);
            peer.outgoing.pop();
        }
    }

    /// Call when the rank receives no more. Messages that it sent earlier may still have to be
    /// read; after them it is lost.
    void stop_sending(Peer& peer) noexcept {
        for (; !peer.outgoing.empty(); peer.outgoing.pop()) set_over(peer.outgoing.oldest().ticket);
    }

    void pull(int rank) {
        Peer& peer = peers_[rank];
        Incoming& incoming = peer.incoming;
        constexpr std::size_t header = sizeof(Header);
        while (!peer.lost) {
            const bool in_header = incoming.moved < header;
            std::byte* const to = in_header ? reinterpret_cast<std::byte*>(&incoming.header) + incoming.moved
                                            : incoming.data + (incoming.moved - header);
            const std::size_t bytes = (in_header ? header : incoming.all()) - incoming.moved;
            const ssize_t got = ::recv(peer.socket.get(), to, bytes, MSG_DONTWAIT);
            if (got < 0 && errno == EINTR) continue;
            if (got < 0 && net::may_pass(errno)) {
                if (incoming.moved == 0) peer.takes_all = false;
                return;
            }
            if (got <= 0) {
                peer.silent |= got < 0 && net::is_silence(errno);
                return lose(peer);
            }
            incoming.moved += static_cast<std::size_t>(got);
            if (!in_header && incoming.header.stream != control_stream) passed_ += static_cast<std::size_t>(got);
            if (in_header && incoming.moved == header && !choose_place(rank, peer)) return;
            if (incoming.moved >= header && incoming.moved == incoming.all()) arrive(rank, incoming);
        }
    }

    /// Chooses the destination of a message whose header is here. Returns false if the message must wait. One that
    /// takes long to copy stays in the system for a moment, because earlier messages may make the caller begin its
    /// receive. It waits no longer, since other messages may be behind it.
    bool choose_place(int rank, Peer& peer) {
        Incoming& incoming = peer.incoming;
        if (incoming.header.stream > static_cast<std::uint32_t>(last_stream()) ||
            incoming.header.bytes > largest_message)
            refuse(rank, "a message with an invalid stream or length");
        Inbox& inbox = inbox_of(rank, static_cast<int>(incoming.header.stream));
        incoming.keep = inbox.posted.empty();
        if (incoming.keep && incoming.header.bytes >= max_copied_at_once && !peer.takes_all) {
            const auto now = Clock::now();
            if (!std::exchange(incoming.held_up, true)) peer.held_up_since = now;
            if (now - peer.held_up_since < patience) return false;
            peer.takes_all = true;
        }
        incoming.held_up = false;
        if (incoming.keep) {
            peer.kept += cost(incoming.header.bytes);
            if (peer.kept > most_kept)
                refuse(rank, "more than ", most_kept >> 20, " MiB that this rank has not asked for");
            incoming.own = spare_.take(incoming.header.bytes);
            incoming.own.resize(incoming.header.bytes);
            incoming.data = incoming.own.data();
            incoming.ticket = no_ticket;
        } else {
            const Posted posted = take_posted(rank, inbox, incoming.header.bytes);
            incoming.data = posted.data;
            incoming.ticket = posted.ticket;
            incoming.came = posted.came;
        }
        return true;
    }

    void arrive(int rank, Incoming& incoming) {
        if (incoming.keep) {
            // A receive may have begun since its first byte came.
            Inbox& inbox = inbox_of(rank, static_cast<int>(incoming.header.stream));
            inbox.kept.push({rank, std::move(incoming.own)});
            match(inbox);
        } else {
            if (incoming.came != nullptr) *incoming.came += incoming.header.bytes;
            set_over(incoming.ticket);
        }
        incoming = {};
    }

    List<Peer> peers_;
    std::mutex mutex_;
    Inbox control_;
    TicketBook<bool> tickets_;                ///< by ticket: the message is complete
    SpareMemory<List<std::byte>, 16> spare_;  ///< of kept messages that were delivered
    List<pollfd> waiting_;                    ///< scratch
    std::uint64_t over_ = 0;
    std::uint64_t passed_ = 0;  ///< bytes of data that have passed through the sockets
    Clock::time_point counts_at_ = {};
};

/// Connects all ranks at the rendezvous with one another; each listens at `bind` (see net::listen). If a connection
/// cannot be made within half of `timeout` (30 s at most), every rank throws the same Error, which names the two ranks,
/// and blames the later one.
/// The other half is for telling one another: a rank that has all its connections waits for those that miss one, and
/// must not give up before they say which. Collective.
[[gnu::cold]] inline std::unique_ptr<Transport> make_tcp_transport(bootstrap::AnyRendezvous rendezvous,
                                                                   std::chrono::nanoseconds timeout,
                                                                   const std::string& bind = {}) {
    const std::chrono::nanoseconds limit =
        detail::smaller<std::chrono::nanoseconds>(timeout / 2, std::chrono::seconds(30));
    const int rank = rendezvous.rank(), size = rendezvous.size();
    const auto at = [](std::int64_t r) { return static_cast<std::size_t>(r); };
    const auto fail = [&](const std::string& what, int peer) {
        detail::raise(Errc::peer_failed, {.operation = "connect_mesh", .rank = rank, .peer = peer}, what);
    };
    List<net::Socket> sockets(at(size));
    if (size == 1) return std::make_unique<TcpTransport>(std::move(sockets), rank);

    std::string problem;
    net::Reception reception = net::Reception::open(rendezvous, bind, problem);
    const List<net::Contact> contacts = bootstrap::exchange(rendezvous, reception.contact());
    const auto begun = net::Clock::now();
    List<int> below, above;
    const auto has_no_descriptors = [&](int r) {
        fail(text("rank ", r, " has no file descriptors left for its connections; allow it more (ulimit -n)"), r);
    };
    for (int r = 0; r < size; ++r) {
        const net::Contact& contact = contacts[r];
        if (contact.count == 0 && (contact.error == EMFILE || contact.error == ENFILE)) has_no_descriptors(r);
        if (contact.count == 0)
            fail(text("rank ", r, " cannot listen for connections",
                      r != rank ? "; look at its output"
                                : text(" at ", bind.empty() ? "any address" : "'" + bind + "'", ": ", problem)),
                 r);
        if (r != rank) (r < rank ? below : above).push_back(r);
    }
    for (net::Link& link : net::connect(reception, contacts, rank, rendezvous.secret(), below, above, limit))
        sockets[link.rank] = link.channel.take_socket();

    struct Finding {
        std::int32_t apart = -1, has_no_descriptors = 0;
    } own;
    for (int r = size; r-- > 0;)
        if (r != rank && !sockets[r]) own.apart = r;
    if (own.apart >= 0)
        own.has_no_descriptors = !net::Socket::of_family(AF_INET) && (errno == EMFILE || errno == ENFILE);
    using Tenths = std::chrono::duration<std::int64_t, std::deci>;
    const auto spent = detail::smaller<std::chrono::nanoseconds>(net::Clock::now() - begun, limit);
    const List<Finding> all = bootstrap::exchange(rendezvous, own, timeout - std::chrono::floor<Tenths>(spent));
    for (int r = 0; r < size; ++r)
        if (all[r].has_no_descriptors) has_no_descriptors(r);
    for (int r = 0; r < size; ++r)
        if (const int other = all[r].apart; other >= 0 && other < size) {  // it is from the network
            const int later = detail::larger(other, r);
            fail(text("ranks ", detail::smaller(other, r), " and ", later, " cannot reach one another over TCP within ",
                      bootstrap::format_duration(limit),
                      "; look at the firewall and the network between their machines"),
                 later);
        }
    return std::make_unique<TcpTransport>(std::move(sockets), rank);
}

}  // namespace gradsync::inline v0_2::message_passing
