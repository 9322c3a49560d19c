// SPDX-License-Identifier: BSL-1.0
// What a rank says about failures and departures, as it comes to another rank's world.
#include <optional>

#include <gradsync/collective/messages/message_world.hpp>

#include "attentive_transport.hpp"
#include "fuzz.hpp"

using gradsync::message_passing::MessageWorld;
using gradsync::message_passing::Transport;

/// Many inputs share a world, until it fails.
static const gradsync_fuzz::Target target("control_message", [](gradsync_fuzz::Input input) {
    struct World {
        std::shared_ptr<gradsync_test::LoopbackNetwork> network = std::make_shared<gradsync_test::LoopbackNetwork>(3);
        gradsync::collective::Shared<MessageWorld> own =
            MessageWorld::make(std::unique_ptr<Transport>(new gradsync_fuzz::AttentiveTransport(network, 0)),
                               gradsync::List<gradsync::collective::ProcessIdentity>(3), 3);
    };
    static std::optional<World> world;
    static int inputs = 0;
    if (inputs++ % 1024 == 0 || !world) world.emplace();
    while (input.size() != 0) {
        // Longer ones than a rank says are the transport's to refuse.
        const std::size_t bytes = input.take<std::uint16_t>() % 1233u;
        const std::string message = input.take_bytes(bytes).text();
        world->network->send(1, 0, Transport::control_stream, message.data(), message.size());
        try {
            const std::lock_guard lock(world->own->mutex());
            world->own->poll();
        } catch (const std::exception&) {
            return world.reset();  // the message stays in the network
        }
    }
    if (world->own->failed()) world.reset();
});
