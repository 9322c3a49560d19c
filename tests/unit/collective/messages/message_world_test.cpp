// SPDX-License-Identifier: BSL-1.0
// The end of a world whose owners are gone. The tests of the engine and of the backends cover its messages about failures and departures.
#include <gradsync/collective/messages/message_world.hpp>

#include <doctest/doctest.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <gradsync/collective/process.hpp>

#include "support/loopback_transport.hpp"

namespace {

using gradsync::message_passing::MessageWorld;
using gradsync_test::LoopbackNetwork;
using gradsync_test::LoopbackTransport;

gradsync::collective::Shared<MessageWorld> world(const std::shared_ptr<LoopbackNetwork>& network, int rank) {
    gradsync::List<gradsync::collective::ProcessIdentity> processes(static_cast<std::size_t>(network->size));
    return MessageWorld::make(gradsync::Owner<gradsync::message_passing::Transport>(new LoopbackTransport(network, rank)),
                              std::move(processes), network->size);
}

void poll(MessageWorld& world) {
    std::lock_guard lock(world.mutex());
    world.poll();
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
