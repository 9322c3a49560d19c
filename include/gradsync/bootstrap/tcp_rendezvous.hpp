// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "job.hpp"
#include "reception.hpp"

namespace gradsync::inline v0_2 {

/// Options of TcpRendezvous; each rank has its own.
struct TcpRendezvousOptions {
    /// The time limit: of the wait for rank 0, of the wait for the other ranks, and of every later exchange.
    std::chrono::nanoseconds timeout = std::chrono::minutes(5);
    /// The address or network interface ("eth0") of its machine at which rank 0 listens. Empty: the job's address if
    /// that is a loopback address, otherwise all networks.
    std::string bind = {};
};

namespace net {

/// A meeting at a rank 0 that listens already. The other ranks know its addresses.
struct MeetingPlace {
    Contact contact = {};              ///< of rank 0
    const Socket* listener = nullptr;  ///< on rank 0; its owner keeps it for later meetings
    /// The number of the meeting, in a job that loses ranks and gets others. Rank 0 refuses callers with an older
    /// number. Callers with a newer one call again.
    std::uint32_t generation = 0;
    Look look = {};               ///< what ranks do every few milliseconds until all are here
    List<int>* absent = nullptr;  ///< receives the ranks that rank 0 has missed, on rank 0
};

}  // namespace net

/// A rendezvous at rank 0, which listens on a port that all ranks know.
///
/// Ranks and rank 0 prove to each other that they know the job's token, without sending it (bootstrap/channel.hpp), and
/// sign what they exchange. Rank 0 turns all others away, also those with a wrong rank or number of ranks: they learn
/// why, and the job keeps waiting. Unless ranks meet at a loopback address, the token must be a secret of at least 16
/// characters, or "open". Linux.
class TcpRendezvous : public bootstrap::Participant {
    using Clock = net::Clock;
    using Kind = net::Channel::Kind;

public:
    /// Throws Error on every rank that has arrived if not all arrive in time; it names the missing ones. Throws Error
    /// on the ranks concerned if the size of the job differs between ranks, if two ranks have the same number, if
    /// tokens differ, or if the port is taken. Throws Error(invalid_argument) for an invalid rank, size or time limit,
    /// and for a token that is no secret. Collective.
    explicit TcpRendezvous(Job job, TcpRendezvousOptions options = {});

    /// Internal: the same at a rank 0 that listens already. The job's address and port are not used.
    TcpRendezvous(Job job, TcpRendezvousOptions options, net::MeetingPlace at);

    /// See the concept `Rendezvous`.
    std::vector<Blob> all_gather(std::span<const std::byte> own) { return all_gather(own, timeout()); }
    std::vector<Blob> all_gather(std::span<const std::byte> own, std::chrono::nanoseconds limit);

    std::string_view secret() const noexcept { return job_.token; }  ///< Returns the job's token.

private:
    static std::size_t at(int rank) noexcept { return static_cast<std::size_t>(rank); }

    bool is_told() const noexcept { return place_.contact.count != 0; }

    [[gnu::cold]] std::string place() const {
        const net::Address& told = place_.contact.addresses[0];
        const std::string address = is_told() ? told.text() : job_.address;
        const bool colons = address.find(':') != std::string::npos;
        return bootstrap::text(colons ? "[" : "", address, colons ? "]:" : ":", is_told() ? told.port() : job_.port);
    }
    /// The greeting that rank `from` sends to rank 0.
    [[gnu::cold]] net::Hello hello(int from) const noexcept {
        bootstrap::Sha256 job;
        job.add(job_.run_id);
        return {.size = static_cast<std::uint32_t>(size()),
                .from = static_cast<std::uint32_t>(from),
                .generation = place_.generation,
                .job = job.end()};
    }
    [[gnu::cold]] net::Hash key() const noexcept { return bootstrap::hmac(job_.token, "rendezvous"); }

    // --------------------------------------------------------------------------------------------------------- meeting

    [[gnu::cold]] net::Socket listen() const {
        // Both descriptors have one queue of callers; the other one stays open.
        if (place_.listener != nullptr) {
            net::Socket socket(::fcntl(place_.listener->get(), F_DUPFD_CLOEXEC, 0));
            if (!socket)
                refuse(Errc::invalid_argument, {}, "cannot listen: ", std::strerror(errno),
                       "; look how many files this process may open (ulimit -n)");
            return socket;
        }
        const std::string where = bind_.empty() && job_.is_at_loopback() ? job_.address : bind_;
        std::string problem;
        net::Socket socket = net::listen(where, job_.port, size() + 16, problem);
        if (socket) return socket;
        if (problem == std::strerror(EADDRINUSE))
            refuse(Errc::invalid_argument, {}, "port ", job_.port, " is in use on this machine, ",
                   "perhaps by another job or a store of torch.distributed; choose another MASTER_PORT");
        refuse(Errc::invalid_argument, {}, "cannot listen at ", where.empty() ? "any address" : "'" + where + "'",
               ", port ", job_.port, ": ", problem);
    }

    [[gnu::cold]] void await_callers() {
        net::Reception reception(listen(), hello(0), key());
        const auto deadline = Clock::now() + timeout();
        peers_.resize(at(size()));
        List<int> missing, gone;
        const auto find_missing = [&] {
            missing.clear();
            for (int r = 1; r < size(); ++r) {
                // A replacement may take its number. In a changing job it joins as a new member.
                if (peer(r) && !place_.look && peer(r).socket().has_hung_up()) peer(r) = {}, gone.push_back(r);
                if (!peer(r)) missing.push_back(r);
            }
        };
        find_missing();
        debug("listens at ", place(), bind_.empty() ? "" : " of ", bind_, " for ", bootstrap::list_ranks(missing),
              ", for ", bootstrap::format_duration(timeout()), " at most");
        for (; !missing.empty(); find_missing()) {
            const auto slice = place_.look ? net::Look::period : std::chrono::milliseconds(100);
            net::Link link = reception.answer(detail::smaller(deadline, Clock::now() + slice), missing, find_missing);
            if (place_.look) place_.look.function(place_.look.argument);
            if (!link.channel && Clock::now() < deadline) continue;
            if (!link.channel) {
                if (reception.lacks_descriptors())
                    fail({Errc::peer_failed, 0,
                          "rank 0 has no file descriptors left for its connections; allow it more (ulimit -n)"});
                if (place_.absent != nullptr) *place_.absent = missing;
                if (const auto pause = reception.longest_pause();
                    pause > timeout() / 2 + std::chrono::milliseconds(200))
                    fail({Errc::timeout, 0,
                          bootstrap::text("rank 0 was stopped for ", bootstrap::format_duration(pause), ", and ",
                                          bootstrap::list_ranks(missing), " did not arrive at ", place(), " within ",
                                          bootstrap::format_duration(timeout()), "; find out what stopped it")});
                std::string strangers;
                if (reception.turned_away() != 0)
                    strangers = bootstrap::text(" (callers turned away: ", reception.turned_away());
                if (!reception.told().empty())
                    strangers += bootstrap::text(", the last one because ", reception.told());
                if (!strangers.empty()) strangers += ')';
                if (!gone.empty())
                    strangers += bootstrap::text(" (", bootstrap::list_ranks(gone), " had arrived, and died)");
                fail({Errc::timeout, missing[0],
                      bootstrap::text(
                          bootstrap::list_ranks(missing), " did not arrive at ", place(), " within ",
                          bootstrap::format_duration(timeout()), strangers, "; look at the output of each missing rank",
                          is_told() ? "" : ", and check that all have the same MASTER_ADDR and MASTER_PORT")});
            }
            debug("rank ", link.rank, " arrived");
            gone.erase_if([&](int rank) { return rank == link.rank; });
            peers_[link.rank] = std::move(link.channel);
        }
        for (int r = 1; r < size(); ++r) send(r, {}, Clock::now() + timeout());  // all are here
    }

    [[gnu::cold]] void call() {
        const auto deadline = Clock::now() + timeout();
        net::Answer answer;
        bool asked = false;
        std::chrono::microseconds pause = std::chrono::milliseconds(10);
        for (;; ::usleep(static_cast<useconds_t>(pause.count()))) {  // rank 0 may not listen yet
            pause =
                detail::smaller<std::chrono::microseconds>(2 * pause, std::chrono::milliseconds(is_told() ? 10 : 320));
            const List<net::Address> addresses =
                is_told() ? place_.contact.list() : net::resolve(job_.address, job_.port, deadline, answer.problem);
            if (!addresses.empty()) answer = net::call(addresses, hello(rank()), key(), deadline, place_.look);
            if (answer.channel) break;
            if (answer.silent && !is_told() && !std::exchange(asked, true) &&
                net::is_torch_store(addresses, detail::smaller(deadline, Clock::now() + std::chrono::seconds(1))))
                answer.refusal = {
                    .code = Errc::invalid_argument,
                    .why = "it is a store of torch.distributed; give gradsync a port of its own: set GRADSYNC_PORT"};
            if (!answer.refusal.why.empty())
                refuse(answer.refusal.code, {.peer = 0}, "the process that listens at ", place(),
                       " did not admit this rank: ", answer.refusal.why);
            if (Clock::now() + pause >= deadline)
                refuse(Errc::timeout, {.peer = 0}, "rank 0 could not be reached at ", place(), " within ",
                       bootstrap::format_duration(timeout()), " (", answer.problem, "); look at its output",
                       is_told() ? "" : ", and at MASTER_ADDR and MASTER_PORT");
        }
        debug("reached rank 0 at ", place());
        peers_.push_back(std::move(answer.channel));
        const auto later = Clock::now() + timeout() + moment;
        place_.look.await(peers_[0].socket(), later);
        (void)receive(0, later);  // all are here
    }

    // ------------------------------------------------------------------------------------------------------- exchanges

    /// Rank 0 has been waiting for the others when another rank begins to; it reports missing
    /// ranks before that rank gives up.
    static constexpr std::chrono::seconds moment{2};

    net::Channel& peer(int other) noexcept { return peers_[rank() == 0 ? at(other) : 0]; }

    [[gnu::cold]] void send(int to, std::span<const std::byte> bytes, Clock::time_point deadline,
                            Kind kind = Kind::blob) {
        if (peer(to).send(kind, bootstrap::text_of(bytes), deadline)) return;
        const int error = errno;
        const auto soon = Clock::now() + std::chrono::milliseconds(200);
        Blob unread;
        while (peer(to).receive(kind, unread, soon) == net::Channel::Got::message)  // it may have said why
            if (kind == Kind::refusal) pass_on(net::Refusal::read(bootstrap::text_of(unread)), to);
        errno = error;
        report_lost(to);
    }

    [[gnu::cold]] Blob receive(int from, Clock::time_point deadline, Kind expected = Kind::blob) {
        Kind kind = Kind::refusal;
        Blob blob;
        const net::Channel::Got got = peer(from).receive(kind, blob, deadline);
        if (got == net::Channel::Got::nothing) report_lost(from);
        if (got == net::Channel::Got::message && kind == expected) return blob;
        if (got == net::Channel::Got::message && kind == Kind::refusal)
            pass_on(net::Refusal::read(bootstrap::text_of(blob)), from);
        fail({Errc::peer_failed, from,
              bootstrap::text("rank ", from, " sent nonsense; all ranks must run the same program")});
    }

    [[noreturn]] void report_lost(int other) {
        if (!peer(other)) refuse(Errc::peer_failed, {.peer = other}, "it failed earlier and cannot go on");
        const int error = errno;
        if (error == ETIMEDOUT)
            fail({Errc::timeout, other,
                  bootstrap::text("rank ", other, " did not answer within ", bootstrap::format_duration(limit_),
                                  "; look at its output, or allow more time")});
        const std::string why = error != 0 ? bootstrap::text(" (", std::strerror(error), ")") : "";
        fail({Errc::peer_failed, other,
              bootstrap::text("rank ", other, " is gone", why, "; look at its output for the cause")});
    }

    /// Passes on a refusal; the other ranks learn of it through rank 0.
    [[noreturn]] void pass_on(net::Refusal refusal, int from) {
        if (refusal.peer < 0) refusal.peer = from;
        if (rank() == 0) fail(refusal);
        refuse(refusal.code, {.peer = refusal.peer}, refusal.why);
    }

    /// Fails; the other ranks learn of it through rank 0.
    [[noreturn]] void fail(const net::Refusal& failure) {
        const auto soon = Clock::now() + std::chrono::seconds(1);
        for (net::Channel& channel : peers_)
            if (channel) (void)channel.send(Kind::refusal, failure.words(), soon);
        for (const net::Channel& channel : peers_)
            if (channel && rank() == 0) channel.socket().end(soon);
        for (net::Channel& channel : peers_) channel = {};
        refuse(failure.code, {.peer = failure.peer}, failure.why);
    }

    Job job_;
    std::string bind_;
    net::MeetingPlace place_;
    std::chrono::nanoseconds limit_ = timeout();  ///< of the exchange, for errors
    List<net::Channel> peers_;                    ///< on rank 0: by rank; elsewhere: the one to rank 0
};

static_assert(Rendezvous<TcpRendezvous>);

#ifdef GRADSYNC_ONCE
GRADSYNC_ONCE TcpRendezvous::TcpRendezvous(Job job, TcpRendezvousOptions options)
    : TcpRendezvous(std::move(job), std::move(options), net::MeetingPlace()) {}

GRADSYNC_ONCE TcpRendezvous::TcpRendezvous(Job job, TcpRendezvousOptions options, net::MeetingPlace at)
    : Participant(job.rank, job.size, options.timeout),
      job_(std::move(job)),
      bind_(std::move(options.bind)),
      place_(std::move(at)) {
    if (size() == 1) return;
    if (!is_told() && !job_.is_at_loopback() && job_.token != "open" && job_.token.size() < 16)
        refuse(Errc::invalid_argument, {}, "the ranks meet at ", place(),
               job_.token.empty() ? ", and have no token" : ", and their token is too short",
               ": whoever reaches that port could join them; set GRADSYNC_JOB_TOKEN to the same secret of 16 "
               "characters or more on all ranks, made by 'openssl rand -hex 16', or to 'open' on a network that only "
               "you can reach");
    if (rank() == 0) await_callers();
    else call();
}

GRADSYNC_ONCE std::vector<Blob> TcpRendezvous::all_gather(std::span<const std::byte> own,
                                                          std::chrono::nanoseconds limit) {
    bootstrap::check_blob(own.size(), "all_gather", rank());
    limit_ = detail::clamp_timeout(limit);
    const auto deadline = Clock::now() + limit_;
    std::vector<Blob> all(static_cast<std::size_t>(size()));
    all[static_cast<std::size_t>(rank())].assign(own.begin(), own.end());
    if (rank() != 0) {
        send(0, own, deadline);
        (void)receive(0, deadline, Kind::waiting);
        const auto later = Clock::now() + limit_ + moment;
        for (Blob& blob : all) blob = receive(0, later);
        return all;
    }
    for (int r = 1; r < size(); ++r) send(r, {}, deadline, Kind::waiting);
    for (int r = 1; r < size(); ++r) all[static_cast<std::size_t>(r)] = receive(r, deadline);
    for (int r = 1; r < size(); ++r)
        for (const Blob& blob : all) send(r, blob, deadline);
    return all;
}
#endif

}  // namespace gradsync::inline v0_2
