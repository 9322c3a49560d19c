// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <vector>

#include "../../kernel/host_buffer.hpp"
#include "pending_collective.hpp"

namespace gradsync::inline v0_2::message_passing {

/// One piece of every share of a collective. Each rank owns a share, or only a few ranks do. Every rank sends its
/// contributions to the owners. An owner combines what it receives, in the order of the tree, and sends the result to
/// the ranks that want it. So each element crosses the network as often as in a ring, in two steps, and its bits do not
/// depend on the number of pieces or the rank.
///
/// Both sides must begin messages of one stream in the order of the rounds: call `hear` and `advance` for one round
/// after another, with the gates that earlier rounds have left open.
class Round {
public:
    /// The steps that a round may begin now.
    struct Gates {
        bool hear = true, combine = true, take = true;
    };

    /// The references must outlive this. `piece_bytes`: the most bytes of a piece.
    Round(const Route& route, std::size_t piece_bytes, collective::Combiner& combiner)
        : route_(route), piece_bytes_(piece_bytes), combiner_(combiner) {}

    static std::size_t count(const PendingCollective& pending, std::size_t piece_bytes) noexcept {
        if (pending.call().operation == Operation::barrier || pending.call().elsewhere) return 0;
        const std::size_t piece = piece_bytes / size_of(pending.call().dtype);
        return detail::divide_up(pending.shard(0).size(), piece);  // no share is larger
    }

    /// Starts piece `piece` of `pending`: sends this rank's contributions at once.
    void open(PendingCollective& pending, std::size_t piece) {
        pending_ = &pending;
        piece_ = piece;
        hearing_ = combined_ = taking_ = false;
        for (int k = 1; k < route_.size(); ++k) {
            const int owner = (route_.rank + k) % route_.size();
            const ElementRange range = part(owner);
            if (range.size() == 0 || !collective::contributes(pending.call(), route_.rank, owner)) continue;
            const void* from = pending.input(range);
            if (!pending.in_is_known()) from = std::memcpy(place(sending_, owner), from, bytes(range));
            contributions_out_[owner] = route_.send(owner, Route::contributions, from, bytes(range), true);
        }
    }

    PendingCollective& pending() const noexcept { return *pending_; }

    /// Begins to receive contributions, if it is this round's turn. True if it did and may combine them next. The
    /// caller should then poll: some transports copy a message that has arrived as soon as its receive begins. If it is
    /// combined before the next round's is copied, it is still in the cache.
    bool hear(Gates& gates) {
        const bool begins = !hearing_ && gates.hear && pending_->accepted();
        if (begins) receive_contributions();
        gates.hear &= hearing_;
        return begins && gates.combine && !none(contributions_in_);
    }

    /// Makes all possible progress, after `hear`; true once the round is over.
    bool advance(Gates& gates) {
        if (!combined_ && hearing_ && gates.combine && route_.transport.finish_all(contributions_in_)) combine();
        gates.combine &= combined_;

        // Results are received into the memory from which contributions were sent.
        const bool sent = route_.transport.finish_all(contributions_out_);
        if (!taking_ && hearing_ && gates.take && (sent || !pending_->out_is_known())) take();
        gates.take &= taking_;

        if (taking_) land();
        return combined_ && taking_ && sent && route_.transport.finish_all(results_out_) && none(results_in_);
    }

    /// The step that another rank still owes this one. A higher value is worse.
    enum class Debt {
        none,
        result,  ///< it has not sent its share's result; it may be waiting for others
        look,    ///< it has not received this rank's result; it needs no other rank, but may not have got there yet
        contribution,  ///< it has not sent its contribution or not received this rank's; it needs no other rank
    };
    Debt debt(int rank) const noexcept {
        const auto open = [&](const Tickets& tickets) { return tickets[rank] != Transport::no_ticket; };
        if (open(contributions_in_) || open(contributions_out_)) return Debt::contribution;
        return open(results_out_) ? Debt::look : open(results_in_) ? Debt::result : Debt::none;
    }

    /// Gives up all messages after the world has failed. Returns false if a message may still
    /// be written into this round's memory.
    bool give_up() noexcept {
        return route_.transport.give_up_all({&contributions_out_, &contributions_in_, &results_out_, &results_in_});
    }

private:
    using Tickets = List<Transport::Ticket>;

    static bool none(const Tickets& tickets) noexcept {
        for (const Transport::Ticket ticket : tickets)
            if (ticket != Transport::no_ticket) return false;
        return true;
    }
    std::size_t bytes(ElementRange range) const noexcept { return range.size() * size_of(pending_->call().dtype); }

    /// This round's piece of a share.
    ElementRange part(int owner) const noexcept {
        const ElementRange share = pending_->shard(owner);
        const std::size_t piece = piece_bytes_ / size_of(pending_->call().dtype);
        const std::size_t first = smaller(share.first + piece_ * piece, share.last);
        return {first, smaller(first + piece, share.last)};
    }

    /// The memory for a piece from or to `rank`.
    std::byte* place(kernel::HostBuffer& area, int rank) const {
        if (area.bytes() == 0) area = kernel::HostBuffer(route_.transport_ranks.size() * piece_bytes_);
        return static_cast<std::byte*>(area.data()) + static_cast<std::size_t>(rank) * piece_bytes_;
    }

    Transport::Ticket receive(int from, int stream, void* to, ElementRange range, List<std::size_t>& came) {
        came[from] = 0;
        return route_.receive(from, stream, to, bytes(range), &came[from], bytes(range));
    }

    /// Begins to receive the contributions of the other ranks to this rank's share.
    void receive_contributions() {
        hearing_ = true;
        const ElementRange range = part(route_.rank);
        if (range.size() == 0) return;
        for (int r = 0; r < route_.size(); ++r) {
            if (!collective::contributes(pending_->calls()[r], r, route_.rank)) continue;
            if (r == route_.rank) {
                inputs_[r] = pending_->input(range);
            } else {
                std::byte* const to = place(hearing_area_, r);
                inputs_[r] = to;
                contributions_in_[r] = receive(r, Route::contributions, to, range, contributions_came_);
            }
        }
    }

    /// Once all contributions are here, computes the result and sends it to the ranks that want it.
    void combine() {
        combined_ = true;
        const ElementRange range = part(route_.rank);
        if (range.size() == 0) return;
        for (int r = 0; r < route_.size(); ++r)
            if (r != route_.rank && collective::contributes(pending_->calls()[r], r, route_.rank))
                route_.check_length(r, contributions_came_[r], bytes(range));
        const Call& call = pending_->call();
        const bool keeps = collective::receives(call, route_.rank, route_.rank);
        bool sends = false;
        for (int r = 0; r < route_.size(); ++r) sends |= r != route_.rank && collective::receives(call, r, route_.rank);

        const void* result = nullptr;
        if (collective::reduces(call.operation)) {
            void* outputs[2];
            std::size_t count = 0;
            if (keeps) outputs[count++] = pending_->output(range);
            if (sends && !(keeps && pending_->out_is_known())) outputs[count++] = place(combined_area_, 0);
            if (count == 0) return;
            combiner_.run(pending_->calls(), inputs_, {outputs, count}, range.size());
            result = outputs[count - 1];
        } else {
            const int source = collective::in_is_shard(call.operation) ? route_.rank : call.root;
            result = inputs_[source];
            if (keeps && result != pending_->output(range)) std::memcpy(pending_->output(range), result, bytes(range));
            if (sends && source == route_.rank && !pending_->in_is_known())
                result = std::memcpy(place(combined_area_, 0), result, bytes(range));
        }
        for (int k = 1; k < route_.size(); ++k) {
            const int r = (route_.rank + k) % route_.size();
            if (collective::receives(call, r, route_.rank))
                results_out_[r] = route_.send(r, Route::results, result, bytes(range), true);
        }
    }

    /// Begins to receive the results of the other shares.
    void take() {
        taking_ = true;
        for (int owner = 0; owner < route_.size(); ++owner) {
            const ElementRange range = part(owner);
            if (owner == route_.rank || range.size() == 0 ||
                !collective::receives(pending_->call(), route_.rank, owner))
                continue;
            void* const to = pending_->out_is_known() ? pending_->output(range) : place(taking_area_, owner);
            results_in_[owner] = receive(owner, Route::results, to, range, results_came_);
        }
    }

    void land() {
        for (int owner = 0; owner < route_.size(); ++owner) {
            Transport::Ticket& ticket = results_in_[owner];
            if (ticket == Transport::no_ticket || !route_.transport.finish_one(ticket)) continue;
            const ElementRange range = part(owner);
            route_.check_length(owner, results_came_[owner], bytes(range));
            if (!pending_->out_is_known())
                std::memcpy(pending_->output(range), place(taking_area_, owner), bytes(range));
        }
    }

    const Route& route_;
    const std::size_t piece_bytes_;
    collective::Combiner& combiner_;
    PendingCollective* pending_ = nullptr;
    std::size_t piece_ = 0;
    bool hearing_ = false, combined_ = false, taking_ = false;
    Tickets contributions_out_ = Tickets(route_.transport_ranks.size(), Transport::no_ticket);
    Tickets contributions_in_ = contributions_out_, results_out_ = contributions_out_, results_in_ = contributions_out_;
    /// Bytes, by rank.
    List<std::size_t> contributions_came_ = List<std::size_t>(results_in_.size()), results_came_ = contributions_came_;
    List<const void*> inputs_ = List<const void*>(results_in_.size());
    kernel::HostBuffer sending_, hearing_area_, combined_area_, taking_area_;  ///< allocated when first needed
};

/// The rounds of a communicator that are in flight, of one collective after another.
class Rounds {
public:
    /// The references must outlive this.
    Rounds(const Route& route, collective::Combiner& combiner) {
        const Transport::Window& window = route.transport.window;
        while (piece_bytes_ > 32 * 1024 && piece_bytes_ * route.transport_ranks.size() > window.round_bytes)
            piece_bytes_ /= 2;
        // Among many ranks pieces are no smaller, so rounds are fewer.
        const std::size_t fit = window.rounds * window.round_bytes / (piece_bytes_ * route.transport_ranks.size());
        const std::size_t count = larger<std::size_t>(smaller(window.rounds, fit), 3);
        rounds_.reserve(count);
        for (std::size_t i = 0; i < count; ++i) rounds_.emplace_back(route, piece_bytes_, combiner);
    }

    /// Does this collective need no rounds?
    bool none_for(const PendingCollective& pending) const noexcept { return Round::count(pending, piece_bytes_) == 0; }

    /// Opens as many rounds of `pending` as there is room for; true once all are open. Call it for one collective until
    /// it returns true, then for the next.
    bool open(PendingCollective& pending) {
        for (const std::size_t count = Round::count(pending, piece_bytes_); next_piece_ < count; ++next_piece_) {
            if (opened_ - closed_ == rounds_.size()) return false;
            if (opened_ == closed_) opened_ = closed_ = 0;  // the first round's memory is still in the cache
            at(opened_++).open(pending, next_piece_);
        }
        next_piece_ = 0;
        return true;
    }

    /// Makes all possible progress. `poll()` looks for messages; `over(pending)` is called
    /// after a collective's last round.
    template <class Poll, class Over>
    void advance(Poll&& poll, Over&& over) {
        Round::Gates gates;
        for (std::uint64_t i = closed_; i < opened_; ++i) {
            Round& round = at(i);
            if (round.hear(gates)) poll();
            if (!round.advance(gates) || i != closed_) continue;
            ++closed_;
            // More rounds of its collective are open, or not yet opened.
            const bool more = closed_ == opened_ ? next_piece_ != 0 : &at(closed_).pending() == &round.pending();
            if (!more) over(round.pending());
        }
    }

    /// The worst debt of a rank in a collective's rounds.
    Round::Debt debt(const PendingCollective& pending, int rank) const noexcept {
        auto worst = Round::Debt::none;
        for (std::uint64_t i = closed_; i < opened_; ++i)
            if (const Round& round = rounds_[i % rounds_.size()]; &round.pending() == &pending)
                worst = larger(worst, round.debt(rank));
        return worst;
    }

    /// Gives up all messages after the world has failed. Returns false if a message may still
    /// be written into the rounds' memory.
    bool give_up() noexcept {
        bool all = true;
        for (std::uint64_t i = closed_; i < opened_; ++i) all &= at(i).give_up();
        return all;
    }

private:
    Round& at(std::uint64_t i) noexcept { return rounds_[i % rounds_.size()]; }

    /// The most bytes of a rank's share in a round: so many that the number of rounds does not matter.
    std::size_t piece_bytes_ = 1024 * 1024;
    std::vector<Round> rounds_;
    std::uint64_t opened_ = 0, closed_ = 0;
    std::size_t next_piece_ = 0;  ///< next piece of the collective being opened
};

}  // namespace gradsync::inline v0_2::message_passing
