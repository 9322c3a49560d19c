// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "../combine.hpp"
#include "round.hpp"

namespace gradsync::inline v0_2::message_passing {

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

    /// The steps that a rank has not done yet in a collective's rounds, see Round.
    struct Debts {
        bool own = false, look = false, result = false;
    };
    Debts debts(const PendingCollective& pending, int rank) const noexcept {
        Debts debts;
        for (std::uint64_t i = closed_; i < opened_; ++i) {
            const Round& round = rounds_[i % most];
            if (&round.pending() != &pending) continue;
            debts.own |= round.owes(rank);
            debts.look |= round.owes_a_look(rank);
            debts.result |= round.owes_result(rank);
        }
        return debts;
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
