// SPDX-License-Identifier: BSL-1.0
// ctest: COST 30
#include <gradsync/bootstrap/tcp_rendezvous.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "support/forked.hpp"
#include "support/no_descriptors.hpp"
#include "support/ports.hpp"
#include "support/says.hpp"

using namespace std::chrono_literals;
using gradsync::Errc;
using gradsync::TcpRendezvous;
using gradsync::net::Clock;
using gradsync::net::Hello;
using gradsync::net::Socket;
using gradsync_test::stranger;

namespace {

struct Attempt {
    int code = 0;
    std::string text;  ///< of the error, or ""
    int peer = -1;
};

Attempt attempt(gradsync::Job job, std::chrono::nanoseconds limit = 20s, const std::string& bind = {}) {
    try {
        TcpRendezvous rendezvous(std::move(job), {.timeout = limit, .bind = bind});
        (void)rendezvous.all_gather({});
        return {};
    } catch (const gradsync::Error& error) {
        return {static_cast<int>(error.errc()), error.what(), error.context().peer};
    }
}

bool says(const Attempt& a, const std::string& words) { return gradsync_test::says(a.text, words); }
bool is(const Attempt& a, Errc code) { return a.code == static_cast<int>(code); }
void check_blame(const Attempt& a, Errc code, int peer, const std::string& words) {
    CHECK(is(a, code));
    CHECK(a.peer == peer);
    CHECK(says(a, words));
}

/// Was the stranger turned away?
bool is_hung_up(const Socket& socket) {
    char word;
    const auto deadline = Clock::now() + 10s;
    while (socket.receive_all(&word, 1, deadline)) {
    }
    return errno != ETIMEDOUT;
}

}  // namespace

TEST_CASE("TcpRendezvous: strangers are turned away, and keep nobody from meeting") {
    const std::uint16_t port = gradsync_test::free_port();
    std::vector<Attempt> results(2);
    std::vector<std::thread> ranks;
    ranks.emplace_back([&] { results[0] = attempt({.rank = 0, .size = 2, .port = port, .token = "right"}); });

    const Socket silent = stranger(port);
    const auto send = [&](std::string_view words) {
        Socket socket = stranger(port);
        const bool sent = socket.send_all(words.data(), words.size(), Clock::now() + 10s);
        CHECK((sent || words.size() > 1000));  // who says that much may be turned away in the middle of it
        return socket;
    };
    CHECK(is_hung_up(send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")));
    CHECK(is_hung_up(send(std::string(100'000, 'x'))));
    CHECK(is_hung_up(send(std::string(1, '\0'))));
    // As a rank would, up to some byte; then with every 32-bit word of it changed to the largest.
    Hello hello;
    hello.size = 2;
    hello.from = 1;
    gradsync::bootstrap::Sha256 name;
    hello.job = name.end();
    std::string good(reinterpret_cast<const char*>(&hello), sizeof hello);
    good += std::string(32, 'x');  // no proof
    std::vector<Socket> half;
    for (const std::size_t bytes : {1u, 8u, 12u, 24u, 79u, 80u, 111u}) half.push_back(send(std::string_view(good).substr(0, bytes)));
    for (std::size_t word = 0; word < sizeof hello / 4; ++word) {
        std::string bad = good;
        for (std::size_t i = 0; i < 4; ++i) bad[4 * word + i] = '\xff';
        CHECK(is_hung_up(send(bad)));
    }
    CHECK(is_hung_up(send(good)));

    ranks.emplace_back([&] { results[1] = attempt({.rank = 1, .size = 2, .port = port, .token = "right"}); });
    for (std::thread& rank : ranks) rank.join();
    CHECK(results[0].text == "");
    CHECK(results[1].text == "");
}

TEST_CASE("TcpRendezvous: a rank of another job, and one that is there already, are told so; the others meet all the same") {
    const std::uint16_t port = gradsync_test::free_port();
    Attempt first, third, twins[2];
    std::atomic<int> over{0};
    std::vector<std::thread> ranks;
    ranks.emplace_back([&] { first = attempt({.rank = 0, .size = 3, .port = port, .token = "right"}); });

    const Attempt other = attempt({.rank = 2, .size = 3, .port = port, .token = "wrong"});
    CHECK(is(other, Errc::invalid_argument));
    CHECK(says(other, "the process that listens at localhost:" + std::to_string(port) + " did not admit this rank: the tokens differ"));
    CHECK(says(other, "GRADSYNC_JOB_TOKEN"));
    const Attempt neighbour = attempt({.rank = 2, .size = 3, .port = port, .token = "right", .run_id = "slurm 7"});
    CHECK(says(neighbour, "it belongs to another job; give two jobs different ports"));

    for (Attempt& twin : twins)
        ranks.emplace_back([&] {
            twin = attempt({.rank = 1, .size = 3, .port = port, .token = "right"});
            ++over;
        });
    while (over == 0) std::this_thread::sleep_for(1ms);
    third = attempt({.rank = 2, .size = 3, .port = port, .token = "right"});
    for (std::thread& rank : ranks) rank.join();
    CHECK(first.text == "");
    CHECK(third.text == "");
    const bool was_first = twins[0].text.empty();
    CHECK(twins[was_first ? 0 : 1].text == "");
    CHECK(says(twins[was_first ? 1 : 0], "rank 1 has arrived already; give every process its own RANK"));
}

TEST_CASE("TcpRendezvous: a rank with another world size is refused with the reason, and ends no other rank's job") {
    const std::uint16_t port = gradsync_test::free_port();
    Attempt first, last;
    std::thread rank_0([&] { first = attempt({.rank = 0, .size = 2, .port = port}); });
    for (const int rank : {1, 2}) {
        const Attempt wrong = attempt({.rank = rank, .size = 3, .port = port});
        CHECK(says(wrong, "was told that there are 3 ranks, rank 0 that there are 2; give all the same WORLD_SIZE"));
        CHECK(is(wrong, Errc::parameter_mismatch));
    }
    last = attempt({.rank = 1, .size = 2, .port = port});
    rank_0.join();
    CHECK(first.text == "");
    CHECK(last.text == "");
}

TEST_CASE("TcpRendezvous names missing ranks to all that arrived, whenever they came") {
    const std::uint16_t port = gradsync_test::free_port();
    std::vector<Attempt> results(4);
    std::vector<std::thread> ranks;
    for (const int rank : {1, 3, 0})
        ranks.emplace_back([&, rank] {
            if (rank == 0) std::this_thread::sleep_for(1s);
            results[static_cast<std::size_t>(rank)] = attempt({.rank = rank, .size = 4, .port = port}, 2500ms);
        });
    CHECK(!attempt({.rank = 2, .size = 5, .port = port}).text.empty());
    for (std::thread& rank : ranks) rank.join();
    for (const std::size_t r : {0u, 1u, 3u}) {
        CHECK(is(results[r], Errc::timeout));
        CHECK(results[r].peer == 2);
        CHECK(says(results[r], "rank 2 did not arrive at localhost:" + std::to_string(port) + " within 2.5 s (callers turned away: "));
        // On a busy machine rank 2 may call twice.
        CHECK(says(results[r], ", the last one because rank 2 was told that there are 5 ranks"));
    }
}

TEST_CASE("TcpRendezvous names a rank that misses an exchange to all others, also if rank 0 comes late") {
    const std::uint16_t port = gradsync_test::free_port();
    std::vector<Attempt> results(4);
    std::vector<std::thread> ranks;
    std::atomic<int> over{0};
    for (int rank = 0; rank < 4; ++rank)
        ranks.emplace_back([&, rank] {
            Attempt& result = results[static_cast<std::size_t>(rank)];
            try {
                TcpRendezvous rendezvous({.rank = rank, .size = 4, .port = port}, {.timeout = 6s});
                (void)rendezvous.all_gather({});
                if (rank == 0) std::this_thread::sleep_for(4500ms);
                if (rank != 2) (void)rendezvous.all_gather({});
                while (rank == 2 && over < 3) std::this_thread::sleep_for(1ms);
            } catch (const gradsync::Error& error) {
                result = {static_cast<int>(error.errc()), error.what(), error.context().peer};
            }
            ++over;
        });
    for (std::thread& rank : ranks) rank.join();
    for (const std::size_t r : {0u, 1u, 3u}) check_blame(results[r], Errc::timeout, 2, "rank 2 did not answer within 6 s");
}

TEST_CASE("TcpRendezvous: where rank 0 pauses, a rank that gives up says so, and is not blamed itself") {
    const std::uint16_t port = gradsync_test::free_port();
    std::atomic<int> blamed{-1};
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 3; ++rank)
        ranks.emplace_back([&, rank] {
            try {
                TcpRendezvous rendezvous({.rank = rank, .size = 3, .port = port}, {.timeout = rank == 1 ? 3s : 20s});
                if (rank == 0) std::this_thread::sleep_for(6s);
                (void)rendezvous.all_gather({});
            } catch (const gradsync::Error& error) {
                if (rank == 2) blamed = error.context().peer;
            }
        });
    for (std::thread& rank : ranks) rank.join();
    CHECK(blamed == 0);
}

TEST_CASE("TcpRendezvous: a rank 0 that was stopped blames itself, not those who gave up meanwhile") {
    const std::uint16_t port = gradsync_test::free_port();
    const auto reports = gradsync_test::forked(3, [&](int rank) -> std::string {
        if (rank == 1) return "";  // it does not come
        if (rank == 0 && ::fork() == 0) {
            const auto listens = gradsync_test::stranger(port);
            ::usleep(500'000);
            ::kill(::getppid(), SIGSTOP);
            ::usleep(3'000'000);
            ::kill(::getppid(), SIGCONT);
            ::_exit(0);
        }
        const Attempt said = attempt({.rank = rank, .size = 3, .port = port}, rank == 0 ? 2s : 20s);
        return std::to_string(said.peer) + " " + said.text;
    });
    for (const std::size_t r : {0u, 2u}) {
        CAPTURE(reports[r].text);
        CHECK(reports[r].text.starts_with("0 "));
        CHECK(reports[r].says("rank 0 was stopped for "));
    }
}

TEST_CASE("TcpRendezvous: where the limit is short, who did not arrive is blamed, and not a rank 0 that waited") {
    check_blame(attempt({.rank = 0, .size = 2, .port = gradsync_test::free_port()}, 1s), Errc::timeout, 1, "rank 1 did not arrive at");
}

TEST_CASE("TcpRendezvous names a rank that leaves to all others, also to those that learn of it while they send") {
    for (int round = 0; round < 20; ++round) {
        const std::uint16_t port = gradsync_test::free_port();
        std::vector<Attempt> results(4);
        std::vector<std::thread> ranks;
        for (int rank = 0; rank < 4; ++rank)
            ranks.emplace_back([&, rank] {
                try {
                    TcpRendezvous rendezvous({.rank = rank, .size = 4, .port = port}, {.timeout = 20s});
                    (void)rendezvous.all_gather({});
                    if (rank == 1) return;
                    if (rank == 3) std::this_thread::sleep_for(20ms);  // rank 0 has failed by then
                    (void)rendezvous.all_gather(std::vector<std::byte>(1000));
                } catch (const gradsync::Error& error) {
                    results[static_cast<std::size_t>(rank)] = {static_cast<int>(error.errc()), error.what(), error.context().peer};
                }
            });
        for (std::thread& rank : ranks) rank.join();
        for (const std::size_t r : {0u, 2u, 3u}) check_blame(results[r], Errc::peer_failed, 1, "rank 1 is gone");
    }
}

TEST_CASE("TcpRendezvous: what a rank heard earlier, or said, proves nothing") {
    const std::uint16_t port = gradsync_test::free_port();
    std::string problem;
    const auto limit = [] { return Clock::now() + 10s; };
    // Somebody between rank 1 and rank 0, who passes on what they say, and keeps it.
    const Socket between = gradsync::net::listen("127.0.0.1", 0, 4, problem);
    Attempt first, second;
    std::thread rank_0([&] { first = attempt({.rank = 0, .size = 2, .port = port, .token = "right"}); });
    std::thread rank_1([&] {
        second =
            attempt({.rank = 1, .size = 2, .address = "127.0.0.1", .port = gradsync::net::address_of(between).port(), .token = "right"});
    });
    const Socket caller = between.accept(limit()), called = stranger(port);
    std::string said(sizeof(Hello) + 32, '\0'), challenge(16 + 16 + 32, '\0');
    CHECK(caller.receive_all(said.data(), sizeof(Hello), limit()));
    CHECK(called.send_all(said.data(), sizeof(Hello), limit()));
    CHECK(called.receive_all(challenge.data(), challenge.size(), limit()));
    CHECK(caller.send_all(challenge.data(), challenge.size(), limit()));
    CHECK(caller.receive_all(said.data() + sizeof(Hello), 32, limit()));
    // It says the same to rank 0 over a connection of its own: rank 0's challenge is another one there.
    const Socket again = stranger(port);
    CHECK(again.send_all(said.data(), said.size(), limit()));
    CHECK(is_hung_up(again));
    CHECK(called.send_all(said.data() + sizeof(Hello), 32, limit()));
    // It changes what is exchanged: the signature shows it.
    std::thread backward([&] {
        std::vector<char> words(16 + 32 + 32);  // the welcome
        if (called.receive_all(words.data(), words.size(), limit())) (void)caller.send_all(words.data(), words.size(), limit());
        words.resize(16 + 32);  // all are here
        if (called.receive_all(words.data(), words.size(), limit())) {
            words.back() = static_cast<char>(words.back() ^ 1);
            (void)caller.send_all(words.data(), words.size(), limit());
        }
    });
    rank_1.join();
    backward.join();
    CHECK(is(second, Errc::peer_failed));
    CHECK(says(second, "rank 0 sent nonsense"));
    ::shutdown(called.get(), SHUT_RDWR);
    rank_0.join();
    CHECK(first.peer == 1);
}

TEST_CASE("TcpRendezvous: whoever poses as rank 0 and does not know the token is not believed") {
    std::string problem;
    const Socket posing = gradsync::net::listen("127.0.0.1", 0, 4, problem);
    const std::uint16_t port = gradsync::net::address_of(posing).port();
    Attempt caller;
    std::thread rank_1([&] { caller = attempt({.rank = 1, .size = 2, .address = "127.0.0.1", .port = port, .token = "right"}); });
    gradsync::net::Channel channel(posing.accept(Clock::now() + 10s));
    char words[sizeof(Hello) + 32];
    const auto limit = Clock::now() + 10s;
    CHECK(channel.socket().receive_all(words, sizeof(Hello), limit));
    CHECK(channel.send(gradsync::net::Channel::Kind::challenge, std::string(16, 'x'), limit));
    CHECK(channel.socket().receive_all(words + sizeof(Hello), 32, limit));
    CHECK(channel.send(gradsync::net::Channel::Kind::welcome, std::string(words + sizeof(Hello), 32), limit));  // the caller's own proof
    rank_1.join();
    CHECK(is(caller, Errc::peer_failed));
    CHECK(says(caller, "it does not know the token of this job"));
}

TEST_CASE("TcpRendezvous: off loopback, ranks need a secret or say that all may join") {
    for (const std::string token : {"", "12345678", "slurm 123456.0"}) {
        const Attempt a = attempt({.rank = 0, .size = 2, .address = "192.0.2.1", .token = token}, 200ms);
        CHECK(is(a, Errc::invalid_argument));
        CHECK(says(a, "set GRADSYNC_JOB_TOKEN"));
        CHECK(says(a, token.empty() ? "have no token" : "too short"));
    }
    for (const char* const token : {"open", "0123456789abcdef"})
        CHECK(says(attempt({.rank = 1, .size = 2, .address = "no.such.host.invalid", .token = token}, 200ms), "could not be reached"));
}

TEST_CASE("TcpRendezvous: an address that swallows calls does not keep the next one waiting") {
    const std::uint16_t port = gradsync_test::free_port();
    // A listener whose list is full answers no further call.
    std::string problem;
    const Socket full = gradsync::net::listen("127.0.0.2", port, 0, problem);
    std::vector<Socket> queue;
    gradsync::net::Address swallows = gradsync::net::address_of(full);
    for (int i = 0; i < 4; ++i) {
        queue.push_back(Socket::of_family(AF_INET));
        CHECK(queue.back().connect(swallows.get(), swallows.size()));
    }
    gradsync::net::Reception reception(gradsync::net::listen("127.0.0.1", port, 4, problem), Hello{.size = 2}, {});
    Hello hello;
    hello.size = 2;
    hello.from = 1;
    gradsync::net::Answer answer;
    std::thread caller([&] { answer = gradsync::net::call({swallows, gradsync_test::loopback(port)}, hello, {}, Clock::now() + 10s); });
    const auto start = Clock::now();
    CHECK(reception.answer(start + 10s, {1}).rank == 1);
    CHECK(Clock::now() - start < 9s);
    caller.join();
    CHECK(answer.channel);
}

TEST_CASE("TcpRendezvous: if rank 0 is not there, the error says where it was expected") {
    const Attempt a = attempt({.rank = 1, .size = 2, .port = gradsync_test::free_port()}, 2s);
    CHECK(is(a, Errc::timeout));
    CHECK(a.peer == 0);
    CHECK(says(a, "rank 0 could not be reached at localhost:"));
    CHECK(says(a, "Connection refused"));
    CHECK(says(attempt({.rank = 1, .size = 2, .address = "no.such.host.invalid", .token = "open"}, 200ms), "no.such.host.invalid:29500"));
}

TEST_CASE("TcpRendezvous: if another program has the port, both sides say so") {
    const Socket other = gradsync::net::listen(gradsync_test::loopback(0), 4);
    const std::uint16_t port = gradsync::net::address_of(other).port();
    const Attempt a = attempt({.rank = 0, .size = 2, .address = "127.0.0.1", .port = port});
    CHECK(is(a, Errc::invalid_argument));
    CHECK(says(a, "port " + std::to_string(port) + " is in use"));

    // A server of something else, as a rank meets it.
    std::thread server([&] {
        const Socket caller = other.accept(Clock::now() + 10s);
        const std::string words = "HTTP/1.1 400 Bad Request\r\n\r\n";
        (void)caller.send_all(words.data(), words.size(), Clock::now() + 10s);
        char rest[64];
        (void)caller.receive_all(rest, sizeof rest, Clock::now() + 1s);
    });
    const Attempt b = attempt({.rank = 1, .size = 2, .address = "127.0.0.1", .port = port});
    server.join();
    CHECK(says(b, "did not admit this rank: it is not a rank of gradsync"));
}

TEST_CASE("TcpRendezvous: a store of torch.distributed, which hangs up on what it does not know, is told apart at once") {
    const Socket store = gradsync::net::listen(gradsync_test::loopback(0), 4);
    const std::uint16_t port = gradsync::net::address_of(store).port();
    std::string request(10, ' ');
    std::thread server([&] {
        CHECK(store.accept(Clock::now() + 10s));  // hangs up
        const Socket caller = store.accept(Clock::now() + 10s);
        CHECK(caller.receive_all(request.data(), request.size(), Clock::now() + 10s));
        CHECK(caller.send_all(request.data() + 6, 4, Clock::now() + 10s));
    });
    const Attempt a = attempt({.rank = 1, .size = 2, .address = "127.0.0.1", .port = port});
    server.join();
    CHECK(is(a, Errc::invalid_argument));
    CHECK(says(a, "it is a store of torch.distributed; give gradsync a port of its own"));
    CHECK(request.substr(0, 6) == std::string("\0\xce\xf7\x85\x3c\x0d", 6));
}

TEST_CASE("TcpRendezvous: whoever takes a call and hangs up is not rank 0, which is called again") {
    std::string problem;
    Socket other = gradsync::net::listen("127.0.0.1", 0, 4, problem);
    const std::uint16_t port = gradsync::net::address_of(other).port();
    std::vector<Attempt> results(2);
    std::thread caller([&] { results[1] = attempt({.rank = 1, .size = 2, .address = "127.0.0.1", .port = port}); });
    for (int i = 0; i < 2; ++i) CHECK(other.accept(Clock::now() + 10s));
    other = {};
    results[0] = attempt({.rank = 0, .size = 2, .address = "127.0.0.1", .port = port});
    caller.join();
    for (const Attempt& result : results) CHECK(result.text == "");
}

TEST_CASE("Socket: a connection to itself does not count as one") {
    gradsync::net::Address own = gradsync_test::loopback(0);
    const Socket socket = Socket::of_family(AF_INET);
    REQUIRE(::bind(socket.get(), own.get(), own.size()) == 0);
    own = gradsync::net::address_of(socket);
    REQUIRE(socket.connect(own.get(), own.size()));
    REQUIRE(socket.await(POLLOUT, Clock::now() + 1s));
    CHECK(!socket.is_connected());
    CHECK(errno == ECONNREFUSED);
}

TEST_CASE("resolve: the limit holds, whatever the name server does") {
    std::string problem;
    const auto start = Clock::now();
    (void)gradsync::net::resolve("no.such.host.invalid", 1, start + 50ms, problem);
    CHECK(!problem.empty());
    CHECK(Clock::now() - start < 5s);
    for (const gradsync::net::Address& address : gradsync::net::resolve("localhost", 77, start + 10s, problem)) {
        CHECK(address.text() == "127.0.0.1");  // nobody can answer at ::1 in rank 0's place
        CHECK(address.port() == 77);
    }
}

TEST_CASE("resolve: the name server is not blamed for a lack of file descriptors") {
    std::string problem;
    {
        const gradsync_test::NoDescriptors none;
        (void)gradsync::net::resolve("localhost", 77, Clock::now() + 1s, problem);
    }
    CHECK(problem == "Too many open files");
}

TEST_CASE("TcpRendezvous: rank 0 binds where it is told") {
    CHECK(says(attempt({.rank = 0, .size = 2, .port = gradsync_test::free_port()}, 1s, "192.0.2.1"), "cannot listen at '192.0.2.1'"));
    for (const char* const where : {"127.0.0.1", "lo"}) {
        const std::uint16_t port = gradsync_test::free_port();
        Attempt first;
        std::thread rank_0([&] { first = attempt({.rank = 0, .size = 2, .address = "::1", .port = port}, 20s, where); });
        CHECK(attempt({.rank = 1, .size = 2, .address = "127.0.0.1", .port = port}).text == "");
        rank_0.join();
        CHECK(first.text == "");
    }
}

TEST_CASE("TcpRendezvous refuses invalid ranks and time limits") {
    CHECK(says(attempt({.rank = 2, .size = 2}), "rank 2 is not one of 2"));
    CHECK(says(attempt({.rank = 0, .size = 0}), "rank 0 is not one of 0"));
    CHECK(says(attempt({.rank = 0, .size = 2}, -1s), "time limit must be positive"));
}

TEST_CASE("TcpRendezvous: a rank that has arrived and is gone makes room for the process that is started in its place") {
    const std::uint16_t port = gradsync_test::free_port();
    Attempt first, second, third;
    std::thread rank_0([&] { first = attempt({.rank = 0, .size = 3, .port = port}); });
    const Hello hello{.size = 3, .from = 1, .job = gradsync::bootstrap::Sha256().end()};
    const auto arrives = [&] {
        const gradsync::net::Hash key = gradsync::bootstrap::hmac("", "rendezvous");
        return static_cast<bool>(gradsync::net::call({gradsync_test::loopback(port)}, hello, key, Clock::now() + 10s).channel);
    };
    while (!arrives()) std::this_thread::sleep_for(1ms);  // rank 0 may not listen yet
    std::this_thread::sleep_for(500ms);
    std::thread rank_1([&] { second = attempt({.rank = 1, .size = 3, .port = port}); });
    third = attempt({.rank = 2, .size = 3, .port = port});
    rank_0.join();
    rank_1.join();
    for (const Attempt& one : {first, second, third}) CHECK(one.text == "");
}

TEST_CASE("TcpRendezvous: a rank 0 without file descriptors blames itself, not those that wait for it") {
    const std::uint16_t port = gradsync_test::free_port();
    Attempt first;
    std::thread rank_0([&] { first = attempt({.rank = 0, .size = 2, .port = port}, 1s); });
    const Socket early = stranger(port), late = Socket::of_family(AF_INET);
    {
        const gradsync_test::NoDescriptors none;
        const gradsync::net::Address address = gradsync_test::loopback(port);
        (void)late.connect(address.get(), address.size());
        rank_0.join();
    }
    check_blame(first, Errc::peer_failed, 0, "rank 0 has no file descriptors left for its connections; allow it more (ulimit -n)");
}
