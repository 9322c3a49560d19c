// SPDX-License-Identifier: BSL-1.0
// Two collectives of this rank, whose other ranks send what the input says, to any stream.
#include <list>
#include <numeric>

#include <gradsync/collective/messages/message_engine.hpp>

#include "attentive_transport.hpp"
#include "fuzz.hpp"

namespace mp = gradsync::message_passing;

static const gradsync_fuzz::Target target("message_engine", [](gradsync_fuzz::Input input) {
    using gradsync::collective::Operation;
    using gradsync::collective::Shared;
    const int size = 2 + input.take<std::uint8_t>() % 2, rank = input.take<std::uint8_t>() % size;
    const std::size_t count = input.take<std::uint16_t>() % 600u, all = count * static_cast<std::size_t>(size);
    const auto kinds = input.take<std::uint16_t>();
    struct Network {
        std::list<std::string> memory;  // of all messages: a world may poll until another one is made
        gradsync_test::LoopbackNetwork messages;
        explicit Network(int ranks) : messages(ranks) {}
    };
    const auto whole = std::make_shared<Network>(size);
    const auto call_of = [&](unsigned kind) {
        gradsync::collective::Call call;
        call.operation = static_cast<Operation>(kind % 8);
        call.op = static_cast<gradsync::ReduceOp>(kind / 8 % 5);
        call.root = static_cast<int>(kind / 64) % size;
        const bool gathers = call.operation == Operation::all_gather || call.operation == Operation::gather;
        const bool scatters = call.operation == Operation::reduce_scatter || call.operation == Operation::scatter;
        call.in = whole->memory.emplace_back(all * 4, '\0').data();
        call.out = whole->memory.emplace_back(all * 4, '\0').data();
        call.in_count = scatters && (call.operation != Operation::scatter || call.root == rank) ? all : count;
        call.out_count = gathers && (call.operation != Operation::gather || call.root == rank) ? all : count;
        if (call.operation == Operation::barrier) call.in_count = call.out_count = 0;
        return call;
    };
    const std::shared_ptr<gradsync_test::LoopbackNetwork> network(whole, &whole->messages);
    gradsync::List<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    auto world = mp::MessageWorld::make(std::unique_ptr<mp::Transport>(new gradsync_fuzz::AttentiveTransport(network, rank)),
                                        gradsync::List<gradsync::collective::ProcessIdentity>(ranks.size()), size);
    auto engine = Shared<mp::MessageEngine>::make(world, ranks, rank, 0, Shared<mp::KnownMemory>::make(), std::chrono::milliseconds(1));
    // The others have said good-bye: nothing waits until they have heard of a failure.
    for (int r = 0; r < size; ++r) {
        const struct {
            std::uint64_t next = 0;
            std::int32_t kind = 2, sender = 0, communicator = 0, code = 0, culprit = 0;
            char text[4] = {};
        } gone{.sender = r};
        const std::string& sent = whole->memory.emplace_back(gradsync_fuzz::bytes_of(gone));
        if (r != rank) network->send(r, rank, mp::Transport::control_stream, sent.data(), sent.size());
    }
    std::uint64_t last = engine->start(call_of(kinds & 255u));
    last = engine->start(call_of(kinds >> 8));
    while (input.size() != 0 && !world->failed()) {
        const auto to = input.take<std::uint8_t>();
        const std::size_t bytes = input.take<std::uint16_t>();
        const std::string& sent = whole->memory.emplace_back(input.take_bytes(bytes).text());
        network->send((rank + 1 + to % (size - 1)) % size, rank, to / 16 % (1 + mp::Route::streams), sent.data(), sent.size());
        for (int i = 0; i < 4; ++i) (void)engine->advance_to(last);
    }
});
