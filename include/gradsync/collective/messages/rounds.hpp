// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "../../core/math.hpp"
#include "../../core/shard_range.hpp"
#include "../../kernel/host_buffer.hpp"
#include "../call.hpp"
#include "../combine.hpp"
#include "pending_collective.hpp"
#include "transport.hpp"

namespace gradsync::inline v0_2::message_passing {

/// The data that all rounds of a communicator need.
struct RoundContext {
    Transport& transport;
    const std::vector<int>& transport_ranks;  ///< by rank of the communicator
    int rank;
    int contributions, results;  ///< streams
    std::size_t piece_bytes;
    collective::Combiner& combiner;

    int size() const noexcept { return static_cast<int>(transport_ranks.size()); }
};

/// One piece of every share of a collective. Each rank owns a share, or only a few ranks do. Every rank sends its contributions to the
/// owners. An owner combines what it receives, in rank order, and sends the result to the ranks that want it. So each element crosses the
/// network as often as in a ring, in two steps, and its bits are the same for every number of pieces, and on every rank.
///
/// Both sides must begin messages of one stream in the order of the rounds: call `hear` and `advance` for one round after another, with the
/// gates that the earlier rounds have left open.
class Round {
public:
    /// The steps that a round may begin now.
    struct Gates {
        bool hear = true, combine = true, take = true;
    };

    explicit Round(int ranks)
        : contributions_out_(static_cast<std::size_t>(ranks), Transport::no_ticket),
          contributions_in_(contributions_out_),
          results_out_(contributions_out_),
          results_in_(contributions_out_),
          inputs_(contributions_out_.size()) {}

    static std::size_t count(const PendingCollective& pending, std::size_t piece_bytes) noexcept {
        if (pending.call().operation == Operation::barrier || pending.call().elsewhere) return 0;
        const std::size_t piece = piece_bytes / size_of(pending.call().dtype);
        return gradsync::detail::divide_up(pending.shard(0).size(), piece);  // no share is larger
    }

    /// Begins with piece `piece` of `pending`: sends this rank's contributions at once.
    void open(PendingCollective& pending, std::size_t piece, const RoundContext& context) {
        pending_ = &pending;
        piece_ = piece;
        hearing_ = combined_ = taking_ = false;
        for (int k = 1; k < context.size(); ++k) {
            const int owner = (context.rank + k) % context.size();
            const ElementRange range = part(owner, context);
            if (range.size() == 0 || !collective::contributes(pending.call(), context.rank, owner)) continue;
            const void* from = pending.input(range);
            if (!pending.in_is_known()) from = std::memcpy(place(sending_, owner, context), from, bytes(range));
            contributions_out_[index(owner)] = send(owner, context.contributions, from, range, context);
        }
    }

    PendingCollective& pending() const noexcept { return *pending_; }

    /// Begins to receive contributions, if it is this round's turn. True if it did and may combine them next. The caller should then poll:
    /// some transports copy a message that has arrived as soon as its receive begins. Combined before the next round's is copied, it is
    /// still in the cache.
    bool hear(Gates& gates, const RoundContext& context) {
        const bool begins = !hearing_ && gates.hear && pending_->accepted();
        if (begins) receive_contributions(context);
        gates.hear &= hearing_;
        return begins && gates.combine && !none(contributions_in_);
    }

    /// Makes all possible progress, after `hear`; true once the round is over.
    bool advance(Gates& gates, const RoundContext& context) {
        if (!combined_ && hearing_ && gates.combine && context.transport.finish_all(contributions_in_)) combine(context);
        gates.combine &= combined_;

        // Results are received into the memory that contributions were sent from.
        const bool sent = context.transport.finish_all(contributions_out_);
        if (!taking_ && hearing_ && gates.take && (sent || !pending_->out_is_known())) take(context);
        gates.take &= taking_;

        if (taking_) land(context);
        return combined_ && taking_ && sent && context.transport.finish_all(results_out_) && none(results_in_);
    }

    /// The step that another rank still owes this one. A later value is worse.
    enum class Debt {
        none,
        result,        ///< it has not sent its share's result; it may be waiting for others itself
        look,          ///< it has not received the result of this rank's share; it needs no other rank, but may not have got there yet
        contribution,  ///< it has not sent its contribution, or not received this rank's; it needs no other rank
    };
    Debt debt(int rank) const noexcept {
        const auto open = [&](const Tickets& tickets) { return tickets[index(rank)] != Transport::no_ticket; };
        if (open(contributions_in_) || open(contributions_out_)) return Debt::contribution;
        return open(results_out_) ? Debt::look : open(results_in_) ? Debt::result : Debt::none;
    }

    /// Gives up all messages after the world has failed. Returns false if a message may still be written into this round's memory.
    bool give_up(Transport& transport) noexcept {
        bool all = true;
        for (auto* tickets : {&contributions_out_, &contributions_in_, &results_out_, &results_in_}) all &= transport.give_up_all(*tickets);
        return all;
    }

private:
    using Tickets = std::vector<Transport::Ticket>;

    static std::size_t index(int rank) noexcept { return static_cast<std::size_t>(rank); }
    static bool none(const Tickets& tickets) noexcept {
        return std::all_of(tickets.begin(), tickets.end(), [](Transport::Ticket ticket) { return ticket == Transport::no_ticket; });
    }
    std::size_t bytes(ElementRange range) const noexcept { return range.size() * size_of(pending_->call().dtype); }

    /// This round's piece of a share.
    ElementRange part(int owner, const RoundContext& context) const noexcept {
        const ElementRange share = pending_->shard(owner);
        const std::size_t piece = context.piece_bytes / size_of(pending_->call().dtype);
        const std::size_t first = std::min(share.first + piece_ * piece, share.last);
        return {first, std::min(first + piece, share.last)};
    }

    /// Room for a piece from or to `rank`.
    static std::byte* place(kernel::HostBuffer& area, int rank, const RoundContext& context) {
        if (area.bytes() == 0) area = kernel::HostBuffer(context.transport_ranks.size() * context.piece_bytes);
        return static_cast<std::byte*>(area.data()) + index(rank) * context.piece_bytes;
    }

    Transport::Ticket send(int to, int stream, const void* data, ElementRange range, const RoundContext& context) const {
        return context.transport.send_known(context.transport_ranks[index(to)], stream, data, bytes(range));
    }
    Transport::Ticket receive(int from, int stream, void* data, ElementRange range, const RoundContext& context) const {
        return context.transport.receive_known(context.transport_ranks[index(from)], stream, data, bytes(range), bytes(range));
    }

    /// Begins to receive the contributions of the other ranks to this rank's share.
    void receive_contributions(const RoundContext& context) {
        hearing_ = true;
        const ElementRange range = part(context.rank, context);
        if (range.size() == 0) return;
        for (int r = 0; r < context.size(); ++r) {
            if (!collective::contributes(pending_->calls()[index(r)], r, context.rank)) continue;
            if (r == context.rank) {
                inputs_[index(r)] = pending_->input(range);
            } else {
                std::byte* const to = place(hearing_area_, r, context);
                inputs_[index(r)] = to;
                contributions_in_[index(r)] = receive(r, context.contributions, to, range, context);
            }
        }
    }

    /// Makes the result, once all contributions are here, and sends it to the ranks that want it.
    void combine(const RoundContext& context) {
        combined_ = true;
        const ElementRange range = part(context.rank, context);
        if (range.size() == 0) return;
        const Call& call = pending_->call();
        const bool keeps = collective::receives(call, context.rank, context.rank);
        bool sends = false;
        for (int r = 0; r < context.size(); ++r) sends |= r != context.rank && collective::receives(call, r, context.rank);

        const void* result = nullptr;
        if (collective::reduces(call.operation)) {
            void* outputs[2];
            std::size_t count = 0;
            if (keeps) outputs[count++] = pending_->output(range);
            if (sends && !(keeps && pending_->out_is_known())) outputs[count++] = place(combined_area_, 0, context);
            if (count == 0) return;
            context.combiner.run(pending_->calls(), inputs_, {outputs, count}, range.size());
            result = outputs[count - 1];
        } else {
            const int source = collective::in_is_shard(call.operation) ? context.rank : call.root;
            result = inputs_[index(source)];
            if (keeps && result != pending_->output(range)) std::memcpy(pending_->output(range), result, bytes(range));
            if (sends && source == context.rank && !pending_->in_is_known())
                result = std::memcpy(place(combined_area_, 0, context), result, bytes(range));
        }
        for (int k = 1; k < context.size(); ++k) {
            const int r = (context.rank + k) % context.size();
            if (collective::receives(call, r, context.rank)) results_out_[index(r)] = send(r, context.results, result, range, context);
        }
    }

    /// Begins to receive the other shares' results.
    void take(const RoundContext& context) {
        taking_ = true;
        for (int owner = 0; owner < context.size(); ++owner) {
            const ElementRange range = part(owner, context);
            if (owner == context.rank || range.size() == 0 || !collective::receives(pending_->call(), context.rank, owner)) continue;
            void* const to = pending_->out_is_known() ? pending_->output(range) : place(taking_area_, owner, context);
            results_in_[index(owner)] = receive(owner, context.results, to, range, context);
        }
    }

    void land(const RoundContext& context) {
        for (int owner = 0; owner < context.size(); ++owner) {
            Transport::Ticket& ticket = results_in_[index(owner)];
            if (ticket == Transport::no_ticket || !context.transport.finish_one(ticket) || pending_->out_is_known()) continue;
            const ElementRange range = part(owner, context);
            std::memcpy(pending_->output(range), place(taking_area_, owner, context), bytes(range));
        }
    }

    PendingCollective* pending_ = nullptr;
    std::size_t piece_ = 0;
    bool hearing_ = false, combined_ = false, taking_ = false;
    Tickets contributions_out_, contributions_in_, results_out_, results_in_;
    std::vector<const void*> inputs_;
    kernel::HostBuffer sending_, hearing_area_, combined_area_, taking_area_;  ///< allocated when first needed
};

/// The rounds of a communicator that are under way, of one collective after another.
class Rounds {
public:
    /// `ranks`, by rank of the communicator, and all other references must outlive this. `contributions` and `results` are streams.
    Rounds(Transport& transport, const std::vector<int>& ranks, int rank, int contributions, int results, collective::Combiner& combiner)
        : context_{transport, ranks, rank, contributions, results, piece_bytes(ranks.size()), combiner} {
        for (std::size_t i = 0; i < most; ++i) rounds_.emplace_back(context_.size());
    }

    /// Does this collective need no rounds?
    bool none_for(const PendingCollective& pending) const noexcept { return Round::count(pending, context_.piece_bytes) == 0; }

    /// Opens as many rounds of `pending` as there is room for; true once all are open. Call it for one collective until it returns true,
    /// then for the next.
    bool open(PendingCollective& pending) {
        for (const std::size_t count = Round::count(pending, context_.piece_bytes); next_piece_ < count; ++next_piece_) {
            if (opened_ - closed_ == most) return false;
            if (opened_ == closed_) opened_ = closed_ = 0;  // the first round's memory is still in the cache
            at(opened_++).open(pending, next_piece_, context_);
        }
        next_piece_ = 0;
        return true;
    }

    /// Makes all possible progress. `poll()` looks for messages; `over(pending)` is called after a collective's last round.
    template <class Poll, class Over>
    void advance(Poll&& poll, Over&& over) {
        Round::Gates gates;
        for (std::uint64_t i = closed_; i < opened_; ++i) {
            Round& round = at(i);
            if (round.hear(gates, context_)) poll();
            if (!round.advance(gates, context_) || i != closed_) continue;
            ++closed_;
            // More rounds of its collective are open, or not opened yet.
            const bool more = closed_ == opened_ ? next_piece_ != 0 : &at(closed_).pending() == &round.pending();
            if (!more) over(round.pending());
        }
    }

    /// The worst debt of a rank in a collective's rounds.
    Round::Debt debt(const PendingCollective& pending, int rank) const noexcept {
        auto worst = Round::Debt::none;
        for (std::uint64_t i = closed_; i < opened_; ++i)
            if (const Round& round = rounds_[i % most]; &round.pending() == &pending) worst = std::max(worst, round.debt(rank));
        return worst;
    }

    /// Gives up all messages after the world has failed. Returns false if a message may still be written into the rounds' memory.
    bool give_up() noexcept {
        bool all = true;
        for (std::uint64_t i = closed_; i < opened_; ++i) all &= at(i).give_up(context_.transport);
        return all;
    }
    /// Moves the rounds out, with the memory that messages are written into.
    std::vector<Round> take() noexcept { return std::move(rounds_); }

private:
    /// One is sent, one combined, one received. More rounds would push the pieces out of the cache.
    static constexpr std::size_t most = 3;

    /// Size of one round's share. Small enough that a few rounds of every rank's share are under way, large enough that the number of
    /// rounds does not matter.
    static constexpr std::size_t piece_bytes(std::size_t ranks) noexcept {
        std::size_t bytes = 1024 * 1024;
        while (bytes > 32 * 1024 && bytes * ranks > 2 * 1024 * 1024) bytes /= 2;
        return bytes;
    }

    Round& at(std::uint64_t i) noexcept { return rounds_[i % most]; }

    std::vector<Round> rounds_;
    std::uint64_t opened_ = 0, closed_ = 0;
    std::size_t next_piece_ = 0;  ///< next piece of the collective that is being opened
    RoundContext context_;
};

}  // namespace gradsync::inline v0_2::message_passing
