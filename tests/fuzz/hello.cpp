// SPDX-License-Identifier: BSL-1.0
// What other ranks say about the collective that this rank has started: calls, and the elements after them.
#include <gradsync/collective/failures.hpp>
#include <gradsync/collective/messages/pending_collective.hpp>

#include "fuzz.hpp"

namespace mp = gradsync::message_passing;

namespace {

/// Every message that this rank receives comes from the input, in the order of the receives, and may be shorter than its buffer.
class Wire final : public mp::Transport {
public:
    Wire(gradsync_fuzz::Input input, int rank, int size) : input_(input), rank_(rank), size_(size) {}
    int rank() const noexcept override { return rank_; }
    int size() const noexcept override { return size_; }
    int last_stream() const noexcept override { return 1000; }
    const char* refusal() const noexcept override { return nullptr; }
    std::mutex& mutex() noexcept override { return mutex_; }
    Ticket send(int, int, const void*, std::size_t) override { return 0; }
    Ticket receive(int, int, void* data, std::size_t bytes) override {
        const auto message = input_.take_bytes(std::min<std::size_t>(bytes, input_.take<std::uint16_t>()));
        if (message.size() != 0) std::memcpy(data, message.data(), message.size());
        return 0;
    }
    bool poll() override { return true; }
    bool finish(Ticket) override { return true; }
    bool give_up(Ticket) noexcept override { return true; }

private:
    gradsync_fuzz::Input input_;
    int rank_, size_;
    std::mutex mutex_;
};

}  // namespace

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
    call.in = in.data(), call.out = out.data();
    call.in_count = scatters && (call.operation != Operation::scatter || call.root == rank) ? all : count;
    call.out_count = gathers && (call.operation != Operation::gather || call.root == rank) ? all : count;
    if (call.operation == Operation::barrier) call.in_count = call.out_count = 0;

    Wire wire(input, rank, size);
    gradsync::List<int> ranks;
    for (int r = 0; r < size; ++r) ranks.push_back(r);
    const mp::Route route{wire, ranks, rank, 0};
    const mp::KnownMemory known;
    mp::PendingCollective pending(route, 8192, input.size() % 2 == 0);
    pending.start(0, call, 8192, known);
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
