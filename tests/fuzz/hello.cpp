// SPDX-License-Identifier: BSL-1.0
// What other ranks say about the collective that this rank has started: calls, and the elements after them.
#include <list>
#include <numeric>

#include <gradsync/collective/failures.hpp>
#include <gradsync/collective/messages/pending_collective.hpp>

#include "fuzz.hpp"
#include "support/loopback_transport.hpp"

namespace mp = gradsync::message_passing;

static const gradsync_fuzz::Target target("hello", [](gradsync_fuzz::Input input) {
    using gradsync::collective::Operation;
    const int size = 2 + input.take<std::uint8_t>() % 3, rank = input.take<std::uint8_t>() % size;
    const std::size_t count = input.take<std::uint8_t>(), all = count * static_cast<std::size_t>(size);
    std::string in(all * 8, 'i'), out(all * 8, 'o');
    gradsync::collective::Call call;
    call.operation = static_cast<Operation>(input.take<std::uint8_t>() % 8);
    call.op = static_cast<gradsync::ReduceOp>(input.take<std::uint8_t>() % 3);
    call.root = input.take<std::uint8_t>() % size;
    const bool gathers = call.operation == Operation::all_gather || call.operation == Operation::gather;
    const bool scatters = call.operation == Operation::reduce_scatter || call.operation == Operation::scatter;
    call.in = in.data();
    call.out = out.data();
    call.in_count = scatters && (call.operation != Operation::scatter || call.root == rank) ? all : count;
    call.out_count = gathers && (call.operation != Operation::gather || call.root == rank) ? all : count;
    if (call.operation == Operation::barrier) call.in_count = call.out_count = 0;

    // The other ranks' messages, each to a stream of its sender's choice.
    const auto network = std::make_shared<gradsync_test::LoopbackNetwork>(size);
    gradsync_test::LoopbackTransport transport(network, rank);
    const bool few_owners = input.take<std::uint8_t>() % 2 != 0;
    std::list<std::string> sent;
    while (input.size() != 0) {
        const auto to = input.take<std::uint8_t>();
        const std::size_t bytes = input.take<std::uint16_t>();
        sent.push_back(input.take_bytes(bytes).text());
        network->send((rank + 1 + to % (size - 1)) % size, rank, 1 + to / 16 % mp::Route::streams, sent.back().data(), sent.back().size());
    }
    gradsync::List<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    const mp::Route route{transport, ranks, rank, 0};
    const mp::KnownMemory known;
    mp::PendingCollective pending(route, 8192, few_owners);
    pending.start(0, call, 8192, known);
    while (transport.poll()) {
    }
    if (!pending.hear()) return;
    if (const int misfit = gradsync::collective::first_misfit(pending.calls()); misfit >= 0) {
        (void)gradsync::collective::mismatch(0, pending.calls(), misfit, ranks);
        return;
    }
    pending.accept();
    gradsync::collective::Combiner combiner(ranks.size());
    gradsync::List<const void*> inputs;
    if (pending.is_all_here() && pending.small()) pending.finish_small(combiner, inputs);
});
