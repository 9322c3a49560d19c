// SPDX-License-Identifier: BSL-1.0
// What a rank says about failures and departures, as it comes to another rank's world.
#include <gradsync/collective/messages/message_world.hpp>

#include "fuzz.hpp"
#include "support/loopback_transport.hpp"

using gradsync::message_passing::MessageWorld;
using gradsync::message_passing::Transport;

/// Worlds that have failed are not destroyed until the process ends: many inputs share one.
static const gradsync_fuzz::Target target("control_message", [](gradsync_fuzz::Input input) {
    struct World {
        std::shared_ptr<gradsync_test::LoopbackNetwork> network = std::make_shared<gradsync_test::LoopbackNetwork>(3);
        gradsync::collective::Shared<MessageWorld> own =
            MessageWorld::make(gradsync::Owner<Transport>(new gradsync_test::LoopbackTransport(network, 0)),
                               gradsync::List<gradsync::collective::ProcessIdentity>(3), 3);
    };
    static auto& worlds = *new std::deque<World>;
    static int inputs = 0;
    if (inputs++ % 1024 == 0) worlds.emplace_back();
    World* const world = &worlds.back();
    while (input.size() != 0) {
        const std::size_t bytes = input.take<std::uint16_t>() % 1300u;
        const std::string message = input.take_bytes(bytes).text();
        world->network->send(1, 0, Transport::control_stream, message.data(), message.size());
        const std::lock_guard lock(world->own->mutex());
        try {
            world->own->poll();
        } catch (const std::exception&) {
            worlds.emplace_back();  // the message stays in the network
            return;
        }
    }
});
