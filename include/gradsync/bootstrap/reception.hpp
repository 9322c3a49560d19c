// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/thread.hpp"
#include "channel.hpp"

namespace gradsync::inline v0_2::net {

/// The addresses at which the other ranks can call a process. Plain bytes, to be sent to all.
struct Contact {
    Nonce token = {};         ///< part of the key: the same address may mean another machine elsewhere
    std::uint32_t count = 0;  ///< number of its addresses; 0: it cannot be called
    std::int32_t error = 0;   ///< `errno`, if it cannot
    Address addresses[8] = {};

    Hash key(std::string_view secret) const noexcept {
        return bootstrap::hmac(secret, "connection", bootstrap::bytes_of(token));
    }
    List<Address> list() const {
        List<Address> all;
        for (std::size_t i = 0; i < count && i < std::size(addresses); ++i) all.push_back(addresses[i]);
        return all;
    }
};
static_assert(std::is_trivially_copyable_v<Contact>);

/// The most callers that wait at a listener.
inline constexpr int backlog = 128;

/// Listens at a port of the system's choice, at an address of `bind` (see `listen` of socket.hpp). If that fails,
/// returns no socket, `contact.count` is 0 and `problem` says why.
[[gnu::cold]] inline Socket listen(const std::string& bind, Contact& contact, std::string& problem) {
    Socket listener = listen(bind, 0, backlog, problem);
    if (!listener) {
        contact.error = errno;
        return listener;
    }
    contact.token = Nonce::random();
    const Address own = address_of(listener);
    List<Address> all = own.is_wildcard() ? addresses_of({}) : List<Address>{own};
    if (all.empty()) all = addresses_of("lo");
    for (Address& address : all) {
        if (address.family() == AF_INET6 && own.family() == AF_INET) continue;
        address.set_port(own.port());
        if (contact.count < std::size(contact.addresses)) contact.addresses[contact.count++] = address;
    }
    return listener;
}

/// How long each side waits for words of a possible stranger.
inline constexpr std::chrono::seconds patience{5};

/// A connection to a rank.
struct Link {
    int rank = -1;
    Channel channel = {};
};

/// Answers calls from ranks of the job that know the key, and turns all others away.
class Reception {
public:
    Reception() = default;
    /// Answers calls at `listener`. `own`: what a caller's greeting must contain: the called rank,
    /// and the job's name and size.
    Reception(Socket listener, const Hello& own, const Hash& key) noexcept
        : listener_(std::move(listener)), own_(own), key_(key) {}

    /// Starts to listen for the ranks of `meeting`, at `bind` (see `listen`). If that fails, `contact().count` is 0 and
    /// `problem` says why.
    [[gnu::cold]] static Reception open(const bootstrap::AnyRendezvous& meeting, const std::string& bind,
                                        std::string& problem) {
        Contact contact;
        Socket listener = listen(bind, contact, problem);
        const Hello hello{.size = static_cast<std::uint32_t>(meeting.size()),
                          .to = static_cast<std::uint32_t>(meeting.rank())};
        Reception reception(std::move(listener), hello, contact.key(meeting.secret()));
        reception.contact_ = contact;
        return reception;
    }

    const Contact& contact() const noexcept { return contact_; }
    void close() noexcept {
        listener_ = {};
        callers_.clear();
    }

    /// Returns a call of one of the `expected` ranks; no channel at the deadline. A silent stranger delays nobody; if
    /// there are very many, the oldest are turned away. `refresh()`, if given, updates `expected` before a caller is
    /// judged.
    [[gnu::cold]] Link answer(Clock::time_point deadline, const List<int>& expected) {
        return answer(deadline, expected, [] {});
    }
    [[gnu::cold]] Link answer(Clock::time_point deadline, const List<int>& expected, auto&& refresh) {
        List<pollfd> waiting;
        auto last = Clock::now();
        const auto look = [&] {
            const auto now = Clock::now();
            longest_pause_ = gradsync::detail::larger(longest_pause_, now - last);
            return last = now;
        };
        for (auto now = look(); listener_ && now < deadline; now = look()) {
            callers_.erase_if([&](const Caller& caller) {
                const bool over = caller.until <= now;
                turned_away_ += over && caller.channel;
                return over;
            });
            waiting.clear();
            for (const Caller& caller : callers_) waiting.push_back({caller.channel.socket().get(), POLLIN, 0});
            waiting.push_back({listener_.get(), POLLIN, 0});
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - now).count();
            ::poll(waiting.data(), waiting.size(), left > 100 ? 100 : static_cast<int>(left));
            for (std::size_t i = 0; i < callers_.size(); ++i) {
                Caller& caller = callers_[i];
                if (waiting[i].revents == 0 || listen_to(caller)) continue;
                caller.until = now;  // heard or turned away
                if (!caller.admitted) continue;
                refresh();
                if (!may_enter(caller, expected)) continue;
                caller.channel.secure(proof(key_, 's', caller.words.hello, caller.challenge));
                return {static_cast<int>(caller.words.hello.from), std::move(caller.channel)};
            }
            errno = 0;
            for (int i = 0; i < backlog; ++i) {
                Socket socket = listener_.accept({});
                lacks_descriptors_ = !socket && (errno == EMFILE || errno == ENFILE);
                if (lacks_descriptors_) ::usleep(10'000);  // the next caller keeps waiting
                if (!socket) break;
                if (callers_.size() == static_cast<std::size_t>(backlog))
                    callers_.erase_if([&, oldest = &callers_[0]](const Caller& caller) {
                        return &caller == oldest && ++turned_away_ > 0;
                    });
                socket.send_without_delay();
                callers_.push_back({.channel = Channel(std::move(socket)), .until = now + patience});
            }
        }
        return {};
    }

    /// The number of callers turned away. `told()`: the reason given to the last one that may have
    /// belonged to the job, or empty.
    int turned_away() const noexcept { return turned_away_; }
    /// The longest time in which `answer` looked at no caller: more than a tenth of a second
    /// if this process was stopped.
    std::chrono::nanoseconds longest_pause() const noexcept { return longest_pause_; }
    const std::string& told() const noexcept { return told_; }
    /// Does a caller wait because this process can open no more files?
    bool lacks_descriptors() const noexcept { return lacks_descriptors_; }

private:
    /// A caller that has not yet proved that it belongs to the job.
    struct Caller {
        Channel channel = {};
        Clock::time_point until = {};
        struct Words {
            Hello hello;
            Hash proof;
        } words{};
        std::size_t got = 0;  ///< bytes received of its words
        Nonce challenge = {};
        bool challenged = false, admitted = false;
    };

    /// Reads a caller's words that have arrived, and turns it away at the first wrong byte.
    /// Returns true if more must come.
    [[gnu::cold]] bool listen_to(Caller& caller) {
        Hello& hello = caller.words.hello;
        const std::size_t due = caller.challenged ? sizeof caller.words : sizeof hello;
        const ssize_t count = ::recv(caller.channel.socket().get(),
                                     reinterpret_cast<std::byte*>(&caller.words) + caller.got, due - caller.got, 0);
        if (count < 0) return errno == EAGAIN || errno == EINTR;
        if (count == 0) return false;
        caller.got += static_cast<std::size_t>(count);
        const std::size_t of_magic = gradsync::detail::smaller(caller.got, sizeof hello.magic);
        if (std::memcmp(&hello.magic, &own_.magic, of_magic) != 0) return false;
        if (caller.got >= offsetof(Hello, size) && hello.version != own_.version)
            return refuse(caller, Errc::invalid_argument,
                          "it runs another version of gradsync; give all ranks the same");
        if (caller.got < due) return true;
        if (!caller.challenged) {
            if (!(hello.job == own_.job))
                return refuse(caller, Errc::invalid_argument,
                              "it belongs to another job; give two jobs different ports");
            if (hello.generation < own_.generation)
                return refuse(caller, Errc::peer_left, "the ranks have met again meanwhile, without this one");
            if (hello.generation > own_.generation)
                return false;  // this rank will hear of it, and then admit the caller
            caller.challenge = Nonce::random();
            caller.challenged = true;
            return caller.channel.send(Channel::Kind::challenge, bootstrap::bytes_of(caller.challenge), soon());
        }
        if (!(caller.words.proof == proof(key_, 'c', hello, caller.challenge)))
            return refuse(
                caller, Errc::invalid_argument,
                "the tokens differ; give all ranks of a job the same GRADSYNC_JOB_TOKEN, and two jobs different ports");
        caller.admitted = true;
        return false;
    }

    /// Decides whether a caller that belongs to the job may enter, and tells it so, or why not.
    [[gnu::cold]] bool may_enter(Caller& caller, const List<int>& expected) {
        using gradsync::detail::text;
        const Hello& hello = caller.words.hello;
        if (hello.size != own_.size)
            return refuse(caller, Errc::parameter_mismatch,
                          text("rank ", hello.from, " was told that there are ", hello.size, " ranks, rank ", own_.to,
                               " that there are ", own_.size, "; give all the same WORLD_SIZE"));
        if (hello.to != own_.to || hello.from == own_.to || hello.from >= own_.size)
            return refuse(caller, Errc::invalid_argument, text("there is no room for another rank ", hello.from));
        for (const int rank : expected)
            if (rank == static_cast<int>(hello.from))
                return !caller.channel.socket().has_hung_up() &&  // it calls again, and must find its place free
                       caller.channel.send(Channel::Kind::welcome,
                                           bootstrap::bytes_of(proof(key_, 'a', hello, caller.challenge)), soon());
        return refuse(caller, Errc::invalid_argument,
                      text("rank ", hello.from, " has arrived already; give every process its own RANK"));
    }

    [[gnu::cold]] bool refuse(Caller& caller, Errc code, const std::string& why) {
        told_ = why;
        (void)caller.channel.send(Channel::Kind::refusal, Refusal{code, -1, why}.words(), soon());
        return false;
    }
    static Clock::time_point soon() noexcept { return Clock::now() + std::chrono::milliseconds(200); }

    Socket listener_;
    Hello own_;
    Hash key_;
    List<Caller> callers_;
    Contact contact_;
    std::chrono::nanoseconds longest_pause_{};
    int turned_away_ = 0;
    bool lacks_descriptors_ = false;
    std::string told_;
};

/// How a call ended: with a channel, a refusal, or a problem.
struct Answer {
    Channel channel = {};
    Refusal refusal = {};
    std::string problem = {};
    /// Nobody answered, or hung up before a word: a process that is stopped, is closing, or has too many callers.
    bool silent = false;
};

/// Introduces the caller to the other end of `socket`, by the rules of channel.hpp.
[[gnu::cold]] inline Answer introduce(Socket socket, Hello hello, const Hash& key, Clock::time_point deadline,
                                      const Look& look = {}) {
    using Kind = Channel::Kind;
    using bootstrap::bytes_of;
    Answer answer;
    Channel channel(std::move(socket), true);
    Kind kind = Kind::refusal;
    Blob words;
    const auto hears = [&](Kind expected, std::size_t bytes, Clock::time_point until) {
        look.await(channel.socket(), until);
        const Channel::Got got = channel.receive(kind, words, until, Refusal::longest + 64);
        const bool refused = got == Channel::Got::message && kind == Kind::refusal;
        if (got == Channel::Got::message && kind == expected && words.size() == bytes) return true;
        if (refused) answer.refusal = Refusal::read(bootstrap::text_of(words));
        else if (got == Channel::Got::nothing) {
            answer.silent = true;
            answer.problem = errno == ETIMEDOUT ? "the process that listens there does not answer"
                                                : "the process that listens there hung up";
        } else answer.refusal = {.code = Errc::peer_failed, .why = "it is not a rank of gradsync"};
        return false;
    };
    channel.socket().send_without_delay();
    hello.nonce = Nonce::random();
    // Ranks of the job answer at once; a silent listener must not take the time that another address needs.
    const auto soon = gradsync::detail::smaller(deadline, Clock::now() + patience);
    Nonce challenge;
    if (!channel.socket().send_all(&hello, sizeof hello, soon)) answer.problem = std::strerror(errno);
    else if (hears(Kind::challenge, sizeof challenge, soon)) {
        std::memcpy(&challenge, words.data(), sizeof challenge);
        const Hash own = proof(key, 'c', hello, challenge), others = proof(key, 'a', hello, challenge);
        if (!channel.socket().send_all(&own, sizeof own, deadline)) answer.problem = std::strerror(errno);
        else if (hears(Kind::welcome, sizeof others, deadline)) {
            Hash answered;
            std::memcpy(&answered, words.data(), sizeof answered);
            if (answered == others) {
                channel.secure(proof(key, 's', hello, challenge));
                answer.channel = std::move(channel);
            } else {
                answer.refusal = {.code = Errc::peer_failed, .why = "it does not know the token of this job"};
            }
        }
    }
    return answer;
}

/// Calls the listener at one of `addresses`. An address that does not answer within a quarter of a second does not
/// delay the next ones (as in RFC 8305). Each is tried once, unless the deadline comes first.
[[gnu::cold]] inline Answer call(const List<Address>& addresses, const Hello& hello, const Hash& key,
                                 Clock::time_point deadline, const Look& look = {}) {
    using gradsync::detail::smaller;
    Answer answer{.problem = "no address"};
    List<Socket> trying;
    List<pollfd> waiting;
    std::size_t next = 0;
    auto next_at = Clock::now();
    for (auto now = next_at; now < deadline && (next < addresses.size() || !trying.empty()); now = Clock::now()) {
        if (next < addresses.size() && (now >= next_at || trying.empty())) {
            const Address& address = addresses[next++];
            next_at = now + std::chrono::milliseconds(250);
            Socket socket = Socket::of_family(address.family());
            if (socket && socket.connect(address.get(), address.size())) trying.push_back(std::move(socket));
            else answer.problem = std::strerror(errno);
        }
        waiting.clear();
        for (const Socket& socket : trying) waiting.push_back({socket.get(), POLLOUT, 0});
        const auto until = next < addresses.size() ? smaller(next_at, deadline) : deadline;
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
        const auto most = look ? Look::period.count() : 100;
        ::poll(waiting.data(), waiting.size(), left < 0 ? 0 : static_cast<int>(smaller<std::int64_t>(left, most)));
        if (look) look.function(look.argument);
        for (std::size_t i = 0; i < trying.size() && !answer.channel; ++i) {
            if (waiting[i].revents == 0) continue;
            Socket socket = std::move(trying[i]);
            if (!socket.is_connected()) {
                answer.problem = std::strerror(errno);
                continue;
            }
            bool last = next == addresses.size();
            for (const Socket& other : trying) last &= !other;
            Answer one = introduce(std::move(socket), hello, key,
                                   last ? deadline : smaller(deadline, Clock::now() + patience), look);
            if (one.refusal.why.empty()) one.refusal = std::move(answer.refusal);
            one.silent |= answer.silent;
            answer = std::move(one);
        }
        if (answer.channel) return answer;
        trying.erase_if([](const Socket& socket) { return !socket; });
    }
    if (!trying.empty()) {
        answer.problem = std::strerror(ETIMEDOUT);
        answer.silent = true;
    }
    return answer;
}

/// Does a store of torch.distributed listen at one of `addresses`? It also uses MASTER_PORT,
/// and echoes the number of a ping.
[[gnu::cold]] inline bool is_torch_store(const List<Address>& addresses, Clock::time_point deadline) {
    constexpr unsigned char validate_and_ping[] = {0, 0xce, 0xf7, 0x85, 0x3c, 13, 'p', 'i', 'n', 'g'};
    for (const Address& address : addresses) {
        const Socket socket = Socket::of_family(address.family());
        char echo[4];
        if (socket && socket.connect(address.get(), address.size()) && socket.await(POLLOUT, deadline) &&
            socket.is_connected() && socket.send_all(validate_and_ping, sizeof validate_and_ping, deadline) &&
            socket.receive_all(echo, sizeof echo, deadline) && std::memcmp(echo, "ping", sizeof echo) == 0)
            return true;
    }
    return false;
}

/// Connects this rank: it calls the ranks `called` at their contacts, and the `callers` call `reception`. That takes up
/// to `limit`. A rank that is silent is called again later, so that it holds up no other. Returns the connections that
/// were made. `secret`: that of the rendezvous.
[[gnu::cold]] inline List<Link> connect(Reception& reception, const List<Contact>& contacts, int rank,
                                        std::string_view secret, List<int> called, List<int> callers,
                                        std::chrono::nanoseconds limit) {
    List<Link> links, heard;
    links.reserve(called.size() + callers.size());
    heard.reserve(callers.size());
    const auto end = Clock::now() + limit;
    auto answer = [&] {
        while (!callers.empty()) {
            Link link = reception.answer(end, callers);
            if (!link.channel) return;
            callers.erase_if([&](int caller) { return caller == link.rank; });
            heard.push_back(std::move(link));
        }
    };
    gradsync::detail::Thread answering;  // calls and answers must not wait for each other
    try {
        answering.start(answer);
    } catch (const std::system_error&) {  // no thread: this rank answers after its calls
    }
    const auto is_settled = [&](int r) {
        const Contact& contact = contacts[r];
        const Hello hello{.size = static_cast<std::uint32_t>(contacts.size()),
                          .from = static_cast<std::uint32_t>(rank),
                          .to = static_cast<std::uint32_t>(r)};
        Answer one =
            call(contact.list(), hello, contact.key(secret), gradsync::detail::smaller(end, Clock::now() + limit / 4));
        if (!one.channel) return !one.silent;
        links.push_back({r, std::move(one.channel)});
        return true;
    };
    do called.erase_if(is_settled);
    while (!called.empty() && Clock::now() < end && (::usleep(20'000), true));
    if (answering.joinable()) answering.join();
    else answer();
    for (Link& link : heard) links.push_back(std::move(link));
    return links;
}

}  // namespace gradsync::inline v0_2::net
