// SPDX-License-Identifier: BSL-1.0
// ctest: COST 17
#include <gradsync/bootstrap/reception.hpp>

#include <doctest/doctest.h>

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "support/numbers_only.hpp"
#include "support/ports.hpp"

using namespace std::chrono_literals;
using gradsync::List;
using gradsync::net::Answer;
using gradsync::net::Channel;
using gradsync::net::Clock;
using gradsync::net::Contact;
using gradsync::net::Hello;
using gradsync::net::Link;
using gradsync::net::Reception;
using gradsync::net::Socket;
using gradsync_test::stranger;

namespace {

/// A rank 0 of 4 that listens on the loopback network.
struct Rank0 {
    gradsync_test::NumbersOnly meeting{0, 4, "a secret"};
    std::string problem;
    Reception reception = Reception::open(meeting, "127.0.0.1", problem);
    std::uint16_t port() const { return reception.contact().addresses[0].port(); }
};

/// Calls as rank `from` of `size`.
Answer call(const Contact& contact, int from, std::string_view secret, std::chrono::milliseconds limit, int size = 4) {
    Hello hello;
    hello.size = static_cast<std::uint32_t>(size);
    hello.from = static_cast<std::uint32_t>(from);
    return gradsync::net::call({contact.addresses[0]}, hello, contact.key(secret), Clock::now() + limit);
}

}  // namespace

TEST_CASE("Reception: callers who say nothing, or nonsense, keep nobody waiting") {
    Rank0 rank;
    Reception& reception = rank.reception;
    std::vector<Socket> strangers;
    for (int i = 0; i < 40; ++i) strangers.push_back(stranger(rank.port()));
    const char nonsense[] = "GET / HTTP/1.1\r\n\r\n";
    CHECK(strangers[7].send_all(nonsense, sizeof nonsense, Clock::now() + 10s));
    Answer called;
    std::thread caller([&] { called = call(reception.contact(), 3, "a secret", 15s); });
    const auto start = Clock::now();
    const Link link = reception.answer(start + 15s, List<int>{1, 3});
    CHECK(Clock::now() - start < 10s);  // 40 strangers in a row took 20 s
    caller.join();
    CHECK(link.rank == 3);
    CHECK(link.channel);
    CHECK(called.channel);
}

TEST_CASE("Reception: the time limit holds, however many call") {
    Rank0 rank;
    Reception& reception = rank.reception;
    std::vector<Socket> strangers;
    for (int i = 0; i < 40; ++i) strangers.push_back(stranger(rank.port()));
    const auto start = Clock::now();
    CHECK(!reception.answer(start + 300ms, List<int>{1}).channel);
    CHECK(Clock::now() - start < 10s);
}

TEST_CASE("Reception: where strangers take all places, those that came first make room") {
    Rank0 rank;
    std::vector<Socket> strangers;
    std::thread caller;
    Answer called;
    Link link;
    for (int i = 0; i < 300; ++i) {
        if (i == 200) caller = std::thread([&] { called = call(rank.reception.contact(), 3, "a secret", 15s); });
        strangers.push_back(Socket::of_family(AF_INET));
        (void)strangers.back().connect(rank.reception.contact().addresses[0].get(), rank.reception.contact().addresses[0].size());
        if (i % 50 == 0 && !link.channel) link = rank.reception.answer(Clock::now() + 20ms, List<int>{3});
    }
    const auto start = Clock::now();
    if (!link.channel) link = rank.reception.answer(start + 15s, List<int>{3});
    CHECK(Clock::now() - start < 4s);  // silent strangers are heard for 5 s
    caller.join();
    CHECK(link.channel);
    CHECK(called.channel);
    CHECK(rank.reception.turned_away() > 0);
}

TEST_CASE("Reception tells a caller with a wrong secret, rank or size, or one that is not expected, why it is refused") {
    Rank0 rank;
    Contact other = rank.reception.contact();
    other.token.words[1] ^= 1;
    std::string told[5];
    std::thread callers([&] {
        told[0] = call(rank.reception.contact(), 1, "another secret", 15s).refusal.why;
        told[1] = call(other, 1, "a secret", 15s).refusal.why;
        told[2] = call(rank.reception.contact(), 1, "a secret", 15s, 5).refusal.why;
        told[3] = call(rank.reception.contact(), 4, "a secret", 15s).refusal.why;
        told[4] = call(rank.reception.contact(), 2, "a secret", 15s).refusal.why;
        (void)call(rank.reception.contact(), 1, "a secret", 15s);
    });
    CHECK(rank.reception.answer(Clock::now() + 30s, List<int>{1}).rank == 1);
    callers.join();
    for (int i : {0, 1}) CHECK(told[i].starts_with("the tokens differ"));
    CHECK(told[2].starts_with("rank 1 was told that there are 5 ranks, rank 0 that there are 4"));
    CHECK(told[3] == "there is no room for another rank 4");
    CHECK(told[4].starts_with("rank 2 has arrived already"));
    CHECK(rank.reception.turned_away() == 5);
}

TEST_CASE("Reception: a caller that gave up before it was welcome does not take its rank's place") {
    Rank0 rank;
    const Contact contact = rank.reception.contact();
    std::atomic<bool> challenged{false}, stopped{false};
    std::thread impatient([&] {
        Socket socket = Socket::of_family(AF_INET);
        (void)socket.connect(contact.addresses[0].get(), contact.addresses[0].size());
        Channel channel(std::move(socket), true);
        const Hello hello{.size = 4, .from = 1};
        const auto deadline = Clock::now() + 10s;
        Channel::Kind kind{};
        gradsync::Blob words;
        (void)channel.socket().await(POLLOUT, deadline);
        (void)channel.socket().send_all(&hello, sizeof hello, deadline);
        CHECK((channel.receive(kind, words, deadline) == Channel::Got::message && kind == Channel::Kind::challenge));
        gradsync::net::Nonce challenge;
        std::memcpy(&challenge, words.data(), sizeof challenge);
        challenged = true;
        while (!stopped) std::this_thread::yield();
        const auto proof = gradsync::net::proof(contact.key("a secret"), 'c', hello, challenge);
        (void)channel.socket().send_all(&proof, sizeof proof, deadline);
    });
    while (!challenged) (void)rank.reception.answer(Clock::now() + 20ms, List<int>{1});
    stopped = true;
    impatient.join();
    Answer called;
    std::thread caller([&] { called = call(contact, 1, "a secret", 10s); });
    const Link link = rank.reception.answer(Clock::now() + 15s, List<int>{1});
    caller.join();
    CHECK(link.rank == 1);
    CHECK(called.channel);
}

TEST_CASE("connect: a rank that was stopped for longer than a caller waits for its first words is reached all the same") {
    Rank0 rank;
    const List<Contact> contacts{rank.reception.contact(), Contact{}, Contact{}, Contact{}};
    List<Link> links;
    std::thread caller([&] {
        Reception none;
        links = gradsync::net::connect(none, contacts, 1, "a secret", List<int>{0}, List<int>{}, 60s);
    });
    std::this_thread::sleep_for(gradsync::net::patience + 1s);
    const Link link = rank.reception.answer(Clock::now() + 10s, List<int>{1});
    caller.join();
    CHECK(link.rank == 1);
    REQUIRE(links.size() == 1);
    CHECK(links[0].rank == 0);
}

TEST_CASE("connect: signals do not end it before its time") {
    Rank0 rank;
    const List<Contact> contacts{rank.reception.contact(), Contact{}, Contact{}, Contact{}};
    struct sigaction handled {
    }, before{};
    handled.sa_handler = [](int) {};
    REQUIRE(::sigaction(SIGUSR1, &handled, &before) == 0);
    List<Link> links;
    std::atomic<bool> over = false;
    std::thread caller([&] {
        Reception none;
        links = gradsync::net::connect(none, contacts, 1, "a secret", List<int>{0}, List<int>{}, 60s);
        over = true;
    });
    std::thread signals([&] {
        for (; !over; std::this_thread::sleep_for(1ms)) ::pthread_kill(caller.native_handle(), SIGUSR1);
    });
    std::this_thread::sleep_for(gradsync::net::patience + 1s);  // the first call has found nobody
    (void)rank.reception.answer(Clock::now() + 10s, List<int>{1});
    signals.join();  // before the thread that it signals
    caller.join();
    ::sigaction(SIGUSR1, &before, nullptr);
    CHECK(links.size() == 1);
}

TEST_CASE("Reception: a wildcard to listen at is announced as the addresses that it stands for") {
    gradsync_test::NumbersOnly meeting{0, 4, "a secret"};
    for (const std::string bind : {"", "0.0.0.0", "::"}) {
        CAPTURE(bind);
        std::string problem;
        const Reception reception = Reception::open(meeting, bind, problem);
        CAPTURE(problem);
        if (bind == "::" && reception.contact().count == 0) continue;  // a machine without IPv6
        REQUIRE(reception.contact().count > 0);
        for (std::size_t i = 0; i < reception.contact().count; ++i) {
            gradsync::net::Address address = reception.contact().addresses[i];
            CHECK(address.port() != 0);
            CHECK(address.text() != "0.0.0.0");
            CHECK(address.text() != "::");
        }
    }
}

TEST_CASE("call: a stranger at one address that answers, and then says nothing, leaves time for the others") {
    Rank0 rank;
    const Socket listener = gradsync::net::listen(gradsync_test::loopback(0), 1);
    gradsync::net::Channel stranger;
    std::thread strange([&] {
        stranger = gradsync::net::Channel(listener.accept(Clock::now() + 10s));
        Hello hello;
        CHECK(stranger.socket().receive_all(&hello, sizeof hello, Clock::now() + 10s));
        CHECK(stranger.send(gradsync::net::Channel::Kind::challenge, std::string(sizeof hello.nonce, 'x'), Clock::now() + 10s));
    });
    Hello hello;
    hello.size = 4;
    hello.from = 3;
    Answer called;
    const auto limit = Clock::now() + 20s;
    std::thread caller([&] {
        const List<gradsync::net::Address> addresses{gradsync_test::loopback(gradsync::net::address_of(listener).port()),
                                                     rank.reception.contact().addresses[0]};
        called = gradsync::net::call(addresses, hello, rank.reception.contact().key("a secret"), limit);
    });
    CHECK(rank.reception.answer(limit, List<int>{3}).channel);
    strange.join();
    caller.join();
    CHECK(called.channel);
}

TEST_CASE("Channel: a message that is changed, repeated, left out or turned back is nonsense") {
    using gradsync::net::Channel;
    for (const std::string what : {"unchanged", "changed", "repeated", "left out", "turned back"}) {
        CAPTURE(what);
        int wires[2][2];
        for (auto& ends : wires) REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
        Channel one{Socket(wires[0][0]), true}, two{Socket(wires[1][0])};
        const Socket from_one(wires[0][1]), to_two(wires[1][1]);
        const auto key = gradsync::bootstrap::hmac("a key");
        one.secure(key);
        two.secure(key);
        const auto limit = Clock::now() + 10s;
        std::string first(16 + 5 + 32, '\0'), second = first;
        CHECK(one.send(Channel::Kind::blob, "hello", limit));
        CHECK(one.send(Channel::Kind::blob, "world", limit));
        CHECK(from_one.receive_all(first.data(), first.size(), limit));
        CHECK(from_one.receive_all(second.data(), second.size(), limit));
        if (what == "changed") second[17] = 'a';
        if (what == "repeated") second = first;
        if (what == "left out") first = second;
        Channel& receiver = what == "turned back" ? one : two;
        CHECK((what == "turned back" ? from_one : to_two).send_all((first + second).data(), first.size() + second.size(), limit));
        Channel::Kind kind{};
        gradsync::Blob bytes;
        const bool first_is_right = receiver.receive(kind, bytes, limit) == Channel::Got::message;
        const bool second_is_right = first_is_right && receiver.receive(kind, bytes, limit) == Channel::Got::message;
        CHECK(first_is_right == (what == "unchanged" || what == "changed" || what == "repeated"));
        CHECK(second_is_right == (what == "unchanged"));
    }
}
