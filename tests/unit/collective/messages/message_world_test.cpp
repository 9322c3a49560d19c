// SPDX-License-Identifier: BSL-1.0
// The end of a world whose owners are gone, and news of a failure. The tests of the engine and of the backends cover departures.
#include <gradsync/collective/messages/message_world.hpp>

#include <doctest/doctest.h>

#include <unistd.h>

#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gradsync/collective/messages/tcp_transport.hpp>
#include <gradsync/collective/process.hpp>

#include "support/forked.hpp"
#include "support/loopback_transport.hpp"
#include "support/ports.hpp"

namespace {

using gradsync::message_passing::MessageWorld;
using gradsync_test::LoopbackNetwork;
using gradsync_test::LoopbackTransport;

gradsync::collective::Shared<MessageWorld> world(const std::shared_ptr<LoopbackNetwork>& network, int rank) {
    gradsync::List<gradsync::collective::ProcessIdentity> processes(static_cast<std::size_t>(network->size));
    return MessageWorld::make(std::unique_ptr<gradsync::message_passing::Transport>(new LoopbackTransport(network, rank)),
                              std::move(processes), network->size);
}

void poll(MessageWorld& world) {
    std::lock_guard lock(world.mutex());
    world.poll();
}

namespace net = gradsync::net;

/// A connection between ranks 0 and 1, which are processes. Rank 1 has room for little that it has not read.
net::Socket connection(int rank, std::uint16_t port) {
    if (rank != 0) return gradsync_test::stranger(port, 4096);
    return net::listen(gradsync_test::loopback(port), 1).accept(net::Clock::now() + std::chrono::seconds(30));
}

/// Retired worlds go when another one is made.
void sweep() {
    for (int i = 0; i < 3; ++i) world(std::make_shared<LoopbackNetwork>(1), 0).reset();
}

/// The transports that still use the network. A world that stays keeps its transport, and with it sockets or a communicator.
long transports(const std::shared_ptr<LoopbackNetwork>& network) { return network.use_count() - 1; }

}  // namespace

TEST_CASE("message_world: nonsense on the control stream is an error, and indexes nothing") {
    for (const int byte : {0xff, 0x7f, 0x03}) {
        const auto network = std::make_shared<LoopbackNetwork>(2);
        auto first = world(network, 0);
        const std::vector<unsigned char> nonsense(1232, static_cast<unsigned char>(byte));
        network->send(1, 0, gradsync::message_passing::Transport::control_stream, nonsense.data(), nonsense.size());
        poll(*first);
        REQUIRE(first->failed());
        CHECK(std::string(first->failure().message).find("sent nonsense") != std::string::npos);
        first.reset();
    }
    sweep();
}

TEST_CASE("message_world: a good-bye in the name of the rank that it comes to is nonsense; its world would wait for good") {
    const auto network = std::make_shared<LoopbackNetwork>(2);
    auto first = world(network, 0);
    const struct {
        std::uint64_t next = 0;
        std::int32_t kind = 2, sender = 0, communicator = 0, code = 0, culprit = 0;
        char text[4] = {};
    } gone;
    network->send(1, 0, gradsync::message_passing::Transport::control_stream, &gone, sizeof gone);
    poll(*first);
    CHECK(first->failed());
    first.reset();
    sweep();
}

TEST_CASE("message_world: a forked child does not touch its parent's worlds") {
    const auto network = std::make_shared<LoopbackNetwork>(2);
    auto first = world(network, 0), second = world(network, 1);
    std::mutex& mutex = first->mutex();
    first.reset();  // the second has not said good-bye: it stays
    std::promise<void> locked, has_forked;
    std::thread other([&] {
        const std::lock_guard lock(mutex);
        locked.set_value();
        has_forked.get_future().wait();
    });
    locked.get_future().wait();
    const auto child = [](int) -> std::string {
        ::alarm(20);
        sweep();
        return "swept";
    };
    const auto reports = gradsync_test::forked(1, child, 1);
    has_forked.set_value();
    other.join();
    CHECK(reports[0].says("swept"));
    second.reset();
    sweep();
    CHECK(transports(network) == 0);
}

TEST_CASE("message_world: a world goes although the other rank had heard its good-bye before it said its own") {
    for (const bool heard : {false, true}) {
        CAPTURE(heard);
        const auto network = std::make_shared<LoopbackNetwork>(2);
        auto first = world(network, 0), second = world(network, 1);
        first.reset();
        if (heard) poll(*second);
        sweep();
        CHECK(transports(network) == 2);  // the second rank may still send something
        second.reset();
        sweep();
        CHECK(transports(network) == 0);
    }
}

TEST_CASE("message_world: news of a failure is read even if its sender ends at once, with messages that it has not read") {
    const std::uint16_t port = gradsync_test::free_port();
    const auto reports = gradsync_test::forked(2, [&](int rank) -> std::string {
        gradsync::List<net::Socket> sockets(2);
        sockets[static_cast<std::size_t>(1 - rank)] = connection(rank, port);
        const auto own = MessageWorld::make(
            std::unique_ptr<gradsync::message_passing::Transport>(new gradsync::message_passing::TcpTransport(std::move(sockets), rank)),
            gradsync::List<gradsync::collective::ProcessIdentity>(2), 2);
        std::vector<std::byte> data(200'000);
        const auto send = [&](std::size_t bytes) {
            std::lock_guard lock(own->mutex());
            own->keep_until_over(own->transport().send(1 - rank, 9, data.data(), bytes), 1 - rank, {});
        };
        const auto until = net::Clock::now() + std::chrono::seconds(20);
        if (rank == 0) {
            send(data.size());
            own->fail({gradsync::Errc::peer_failed, 1, "some rank failed"});
            own->deliver(std::chrono::minutes(5));  // which leaves the other one ten seconds
            return "told";
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        send(1);  // rank 0 has no time to read it
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        for (bool lost = false; !own->failed() && !lost && net::Clock::now() < until;) {
            poll(*own);
            lost = own->transport().lost(0);
        }
        return own->failed() ? own->failure().message : "nothing was heard";
    });
    CHECK(reports[0].text == "told");
    CHECK(reports[1].text == "some rank failed");
}

TEST_CASE("message_world: news of a failure is passed on, once") {
    const auto network = std::make_shared<LoopbackNetwork>(3);
    auto first = world(network, 0), second = world(network, 1), third = world(network, 2);
    const auto told = [&](MessageWorld& one) { return one.failed() && one.failure().message == "some rank failed"; };
    // Rank 0 ends before rank 2 hears it.
    gradsync::message_passing::Transport& zero = first->transport();
    struct {
        std::uint64_t next = 0;
        std::int32_t kind = 0, sender = 0, communicator = 0, code = static_cast<std::int32_t>(gradsync::Errc::peer_failed), culprit = 0;
        char text[32] = "some rank failed";
    } news;
    zero.send(1, gradsync::message_passing::Transport::control_stream, &news, sizeof news);
    poll(*second);
    poll(*third);
    CHECK(told(*second));
    CHECK(told(*third));
    for (int i = 0; i < 3; ++i)
        for (MessageWorld* const one : {first.get(), second.get(), third.get()}) poll(*one);
    CHECK(told(*first));
}
