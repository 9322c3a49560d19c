// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/math.hpp"
#include "job.hpp"
#include "rendezvous.hpp"
#include "socket.hpp"

namespace gradsync::inline v0_2 {

struct TcpRendezvousOptions {
    std::chrono::nanoseconds timeout = std::chrono::minutes(5);  ///< limit of the meeting, and of every exchange after it
    /// The address at which rank 0 listens. "": the job's if it is a loopback address, otherwise all of the machine's.
    std::string bind = {};
};

/// Ranks meet at rank 0, which listens on a port that all know.
///
/// Rank 0 accepts a caller that sends the right greeting, the job's token and a rank that is missing. It turns all others away, at the cost
/// of the system call. The token keeps out strangers and other jobs; it is sent in plain text, so the network must be one that you trust.
/// Linux.
class TcpRendezvous : public bootstrap::Participant {
    using Clock = net::Clock;

public:
    /// Collective. Throws Error on every rank if not all arrive in time (naming those that did not), or if the size of the job differs
    /// between ranks. Throws Error on the ranks concerned if two ranks have one number, tokens differ, or the port is taken. Throws
    /// Error(invalid_argument) for an invalid rank, size, time limit or token.
    explicit TcpRendezvous(Job job, TcpRendezvousOptions options = {});

    /// See the concept `Rendezvous`.
    std::vector<Blob> all_gather(std::span<const std::byte> own);

private:
    // Machines of one job must have one byte order; with another one, the magic number does not match.
    enum class Kind : std::uint32_t { blob = 1, refusal };
    struct Hello {
        std::uint64_t magic = 0x31636e7973646172u;
        std::uint32_t version = 2;
        std::uint32_t size = 0;
        std::uint32_t rank = 0;
        std::uint32_t token_bytes = 0;  ///< length of the token that follows
    };
    struct Header {
        std::uint32_t magic = 0x636e7973u;
        Kind kind = Kind::refusal;
        std::uint64_t bytes = 0;  ///< length of the data that follows
    };

    static constexpr std::size_t longest_token = 256, longest_text = 1000;
    static constexpr std::size_t max_undecided = 256;   ///< callers that have not introduced themselves yet
    static constexpr std::chrono::seconds patience{5};  ///< time for each of them to do so

    static std::size_t at(int rank) noexcept { return static_cast<std::size_t>(rank); }

    [[gnu::cold]] std::string place() const {
        const bool colons = job_.address.find(':') != std::string::npos;
        return bootstrap::text(colons ? "[" : "", job_.address, colons ? "]:" : ":", job_.port);
    }

    // ------------------------------------------------------------------------------------------------ the meeting, rank 0

    /// A caller that has not introduced itself completely.
    struct Caller {
        net::Socket socket;
        Clock::time_point until;
        std::size_t got = 0;
        std::byte words[sizeof(Hello) + longest_token];
    };
    enum class Verdict { undecided, taken, gone };

    [[gnu::cold]] net::Socket listen() const {
        std::string where = bind_;
        if (where.empty() && (job_.address == "localhost" || job_.address == "::1" || job_.address.rfind("127.", 0) == 0))
            where = job_.address;
        std::string problem;
        net::Socket socket = net::listen(where, job_.port, size() + 16, problem);
        if (socket) return socket;
        if (problem == std::strerror(EADDRINUSE))
            refuse(Errc::invalid_argument,
                   bootstrap::text("port ", job_.port, " is in use on this machine, by another job perhaps; choose another MASTER_PORT"));
        where = where.empty() ? "any address" : "'" + where + "'";
        refuse(Errc::invalid_argument, bootstrap::text("cannot listen at ", where, ", port ", job_.port, ": ", problem));
    }

    [[gnu::cold]] void await_callers() {
        const net::Socket listener = listen();
        const auto deadline = Clock::now() + timeout();
        peers_.resize(at(size()));
        missing_ = size() - 1;
        List<Caller> undecided;
        List<pollfd> waiting;
        while (missing_ > 0) {
            const auto now = Clock::now();
            if (now >= deadline) say_who_is_missing();
            undecided.erase_if([&](const Caller& caller) { return caller.until <= now && ++turned_away_ > 0; });
            waiting.clear();
            waiting.push_back({undecided.size() < max_undecided ? listener.get() : -1, POLLIN, 0});  // -1: nothing is looked at
            for (const Caller& caller : undecided) waiting.push_back({caller.socket.get(), POLLIN, 0});
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - now).count();
            ::poll(waiting.data(), waiting.size(), left > 200 ? 200 : static_cast<int>(left));
            undecided.erase_if([&, i = std::size_t{0}](Caller& caller) mutable {
                const Verdict verdict = waiting[++i].revents != 0 ? listen_to(caller) : Verdict::undecided;
                turned_away_ += verdict == Verdict::gone;
                return verdict != Verdict::undecided;
            });
            while (undecided.size() < max_undecided) {
                net::Socket socket = listener.accept(Clock::time_point{});
                if (!socket) break;
                undecided.push_back({std::move(socket), Clock::now() + patience, 0, {}});
            }
        }
        for (int r = 1; r < size(); ++r) send(r, {}, Clock::now() + timeout());  // welcome
    }

    /// Reads what has arrived of a caller's greeting, and turns it away at the first wrong byte.
    [[gnu::cold]] Verdict listen_to(Caller& caller) {
        const ssize_t count = ::recv(caller.socket.get(), caller.words + caller.got, sizeof caller.words - caller.got, 0);
        if (count < 0) return errno == EAGAIN || errno == EINTR ? Verdict::undecided : Verdict::gone;
        if (count == 0) return Verdict::gone;
        caller.got += static_cast<std::size_t>(count);

        const Hello expected;
        Hello hello;
        const std::size_t known = caller.got < sizeof hello.magic ? caller.got : sizeof hello.magic;
        if (std::memcmp(caller.words, &expected.magic, known) != 0) return Verdict::gone;
        if (caller.got < sizeof hello) return Verdict::undecided;
        std::memcpy(&hello, caller.words, sizeof hello);
        if (hello.version != expected.version) return turn_away(caller, "rank 0 runs another version of gradsync; give all ranks the same");
        if (hello.token_bytes > longest_token || caller.got > sizeof hello + hello.token_bytes) return Verdict::gone;
        if (caller.got < sizeof hello + hello.token_bytes) return Verdict::undecided;
        if (!token_is(caller.words + sizeof hello, hello.token_bytes))
            return turn_away(caller, bootstrap::text("another job listens at ", place(),
                                                     " (the tokens differ); give all ranks of a job the same GRADSYNC_JOB_TOKEN, "
                                                     "and two jobs different ports"));
        const auto caller_rank = static_cast<int>(hello.rank);
        if (hello.size != static_cast<std::uint32_t>(size())) {
            const std::string what = bootstrap::text("rank ", hello.rank, " was told that there are ", hello.size,
                                                     " ranks, rank 0 that there are ", size(), "; give all the same WORLD_SIZE");
            turn_away(caller, what);
            tell_all(what);
            refuse(Errc::parameter_mismatch, what, caller_rank);
        }
        if (hello.rank == 0 || hello.rank >= hello.size)
            return turn_away(caller, bootstrap::text("there is no room for another rank ", hello.rank));
        if (peers_[at(caller_rank)])
            return turn_away(caller, bootstrap::text("rank ", hello.rank, " has arrived already; give every process another RANK"));
        caller.socket.send_without_delay();
        peers_[at(caller_rank)] = std::move(caller.socket);
        --missing_;
        return Verdict::taken;
    }

    /// Takes a time that does not depend on where the tokens differ.
    bool token_is(const std::byte* words, std::size_t bytes) const noexcept {
        unsigned difference = bytes != job_.token.size();
        for (std::size_t i = 0; i < bytes && i < job_.token.size(); ++i)
            difference |= static_cast<unsigned>(words[i]) ^ static_cast<unsigned char>(job_.token[i]);
        return difference == 0;
    }

    [[gnu::cold]] static Verdict turn_away(const Caller& caller, const std::string& why) {
        tell(caller.socket, why);
        return Verdict::gone;
    }
    [[gnu::cold]] static void tell(const net::Socket& socket, const std::string& why) {
        Header header;
        header.bytes = why.size() < longest_text ? why.size() : longest_text;
        const auto soon = Clock::now() + std::chrono::milliseconds(200);
        if (socket.send_all(&header, sizeof header, soon)) (void)socket.send_all(why.data(), header.bytes, soon);
    }
    [[gnu::cold]] void tell_all(const std::string& why) const {
        for (const net::Socket& peer : peers_)
            if (peer) tell(peer, why);
    }

    [[noreturn]] void say_who_is_missing() const {
        List<int> missing;
        for (int r = 1; r < size(); ++r)
            if (!peers_[at(r)]) missing.push_back(r);
        const std::string what = bootstrap::text(bootstrap::list_ranks(missing), " did not arrive at ", place(), " within ",
                                                 bootstrap::format_duration(timeout()),
                                                 turned_away_ != 0 ? bootstrap::text(" (", turned_away_, " callers were turned away)") : "",
                                                 "; look at their output, and whether they were told the same MASTER_ADDR and MASTER_PORT");
        tell_all(what);
        refuse(Errc::timeout, what, missing.front());
    }

    // -------------------------------------------------------------------------------------------- the meeting, other ranks

    [[gnu::cold]] void call() {
        const auto deadline = Clock::now() + timeout();
        std::string problem;
        peers_.resize(1);
        for (;;) {
            const net::Addresses addresses = net::resolve(job_.address, job_.port, 0, problem);
            for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
                net::Socket socket = net::Socket::of_family(at->ai_family);
                if (socket && socket.connect(at->ai_addr, at->ai_addrlen, gradsync::detail::smaller(deadline, Clock::now() + patience))) {
                    peers_[0] = std::move(socket);
                    if (introduce_myself(deadline)) return;
                    problem = "whoever listens there hung up";
                } else {
                    problem = std::strerror(errno);
                }
            }
            if (Clock::now() >= deadline)
                refuse(Errc::timeout,
                       bootstrap::text("rank 0 was not to be reached at ", place(), " within ", bootstrap::format_duration(timeout()), " (",
                                       problem, "); look at its output, and at MASTER_ADDR and MASTER_PORT"),
                       0);
            ::usleep(20'000);  // rank 0 may not listen yet
        }
    }

    /// Returns false if the other side hangs up before it has said anything: it is not rank 0, or not yet.
    [[gnu::cold]] bool introduce_myself(Clock::time_point deadline) {
        Hello hello;
        hello.size = static_cast<std::uint32_t>(size());
        hello.rank = static_cast<std::uint32_t>(rank());
        hello.token_bytes = static_cast<std::uint32_t>(job_.token.size());
        peers_[0].send_without_delay();
        // Rank 0 knows which ranks are missing: it gets a moment more than this rank to report them.
        const auto later = deadline + std::chrono::seconds(2);
        if (!peers_[0].send_all(&hello, sizeof hello, deadline) || !peers_[0].send_all(job_.token.data(), job_.token.size(), deadline))
            return false;
        char first;
        if (peers_[0].await(POLLIN, later) && ::recv(peers_[0].get(), &first, 1, MSG_PEEK) <= 0) return false;
        (void)receive(0, later, Errc::invalid_argument);  // welcome
        return true;
    }

    // --------------------------------------------------------------------------------------------------------- exchanges

    const net::Socket& peer(int other) const noexcept { return peers_[rank() == 0 ? at(other) : 0]; }

    [[gnu::cold]] void send(int to, std::span<const std::byte> bytes, Clock::time_point deadline) {
        const Header header{.kind = Kind::blob, .bytes = bytes.size()};
        if (!peer(to).send_all(&header, sizeof header, deadline) || !peer(to).send_all(bytes.data(), bytes.size(), deadline))
            report_lost(to);
    }

    /// `refused`: the code of the error if the other rank sends a refusal instead.
    [[gnu::cold]] Blob receive(int from, Clock::time_point deadline, Errc refused = Errc::peer_failed) {
        const Header expected;
        Header header;
        if (!peer(from).receive_all(&header, sizeof header, deadline)) report_lost(from);
        const bool known = header.kind == Kind::blob || header.kind == Kind::refusal;
        if (header.magic != expected.magic || header.bytes > largest_blob || !known)
            fail(Errc::peer_failed,
                 from == 0 ? bootstrap::text("what listens at ", place(), " is no rank 0 of gradsync; choose another MASTER_PORT")
                           : bootstrap::text("rank ", from, " sent nonsense; all ranks must run the same program"),
                 from);
        Blob blob(header.bytes);
        if (!peer(from).receive_all(blob.data(), blob.size(), deadline)) report_lost(from);
        if (header.kind == Kind::refusal) {
            const std::string why(reinterpret_cast<const char*>(blob.data()), blob.size() < longest_text ? blob.size() : longest_text);
            refuse(refused, why, from);
        }
        return blob;
    }

    [[noreturn]] void report_lost(int other) {
        if (!peer(other)) refuse(Errc::peer_failed, "it failed earlier and cannot go on", other);
        const int error = errno;
        if (error == ETIMEDOUT)
            fail(Errc::timeout,
                 bootstrap::text("rank ", other, " did not answer within ", bootstrap::format_duration(timeout()),
                                 "; look at its output, or allow more time"),
                 other);
        const std::string why = error != 0 ? bootstrap::text(" (", std::strerror(error), ")") : "";
        fail(Errc::peer_failed, bootstrap::text("rank ", other, " is gone", why, "; look at its output for the cause"), other);
    }

    /// The others learn of the failure through rank 0.
    [[noreturn]] void fail(Errc code, const std::string& what, int culprit) {
        if (rank() == 0) tell_all(what);
        for (net::Socket& socket : peers_) socket = {};
        refuse(code, what, culprit);
    }

    Job job_;
    std::string bind_;
    List<net::Socket> peers_;  ///< on rank 0: by rank; elsewhere: the one to rank 0
    int missing_ = 0;
    std::size_t turned_away_ = 0;
};

static_assert(Rendezvous<TcpRendezvous>);

#ifdef GRADSYNC_ONCE
GRADSYNC_ONCE TcpRendezvous::TcpRendezvous(Job job, TcpRendezvousOptions options)
    : Participant(job.rank, job.size, options.timeout), job_(std::move(job)), bind_(std::move(options.bind)) {
    if (job_.token.size() > longest_token)
        refuse(Errc::invalid_argument, bootstrap::text("the token is longer than ", longest_token, " bytes"));
    if (size() == 1) return;
    if (rank() == 0) await_callers();
    else call();
}

GRADSYNC_ONCE std::vector<Blob> TcpRendezvous::all_gather(std::span<const std::byte> own) {
    bootstrap::check_blob(own.size(), "all_gather", rank());
    const auto deadline = Clock::now() + timeout();
    std::vector<Blob> all(static_cast<std::size_t>(size()));
    all[at(rank())].assign(own.begin(), own.end());
    if (rank() != 0) {
        send(0, own, deadline);
        for (Blob& blob : all) blob = receive(0, deadline);
        return all;
    }
    for (int r = 1; r < size(); ++r) all[at(r)] = receive(r, deadline);
    for (int r = 1; r < size(); ++r)
        for (const Blob& blob : all) send(r, blob, deadline);
    return all;
}
#endif

}  // namespace gradsync::inline v0_2
