// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "../../core/clock.hpp"
#include "../failures.hpp"
#include "board.hpp"

namespace gradsync::inline v0_2::shared_memory {

/// A collective of another seat, of which a collective of this seat is a piece.
struct Whole {
    Call call;
    std::uint64_t number = 0;
};

/// Finds the ranks that keep a collective from completing, as far as one rank at a board can see, and ends the world for it. `whole`: the
/// collective that this one is a piece of, for the messages; null if it is not a piece. Thread-safe.
class BoardFailureDetector {
    using Late = collective::Late;

public:
    BoardFailureDetector(Board& board, int rank) noexcept : board_(board), rank_(rank) {}

    /// "all_reduce(sum, f32, 8 elements), collective #3"; n was started by this rank.
    std::string name(std::uint64_t n, const Whole* whole = nullptr) const {
        return whole ? collective::name_of(whole->call, whole->number) : collective::name_of(board_.cell(n, rank_).call, n);
    }

    /// The ranks that keep collective n from completing: those that did not start it. If all did: those that are in the middle of some
    /// work, possibly on another rank's share. If none is: those whose shares are not done, since no waiting rank has helped them.
    Late late(std::uint64_t n) const {
        if (board_.done(n)) return {};
        const auto those = [&](auto&& are_late) {
            std::vector<int> ranks;
            for (int r = 0; r < board_.size(); ++r)
                if (are_late(r)) ranks.push_back(board_.world_rank(r));
            return ranks;
        };
        if (!board_.all_arrived(n)) return {.ranks = those([&](int r) { return !board_.arrived(n, r); })};
        Late late{.ranks = those([&](int r) { return r != rank_ && is_busy(r); }), .did = Late::Did::not_go_on};
        if (late.ranks.empty()) late.ranks = those([&](int r) { return r != rank_ && !share_is_done(n, r); });
        return late;
    }

    // For all functions below, `unstarted` is the first collective, up to the one that is waited for, that some rank may not have started;
    // if there is none, the one that is waited for.

    void report_timeout(std::uint64_t unstarted, const Whole* whole, std::chrono::nanoseconds limit) const {
        Late who = late(unstarted);
        if (whole != nullptr) who.did = Late::Did::not_go_on;
        board_.world().fail(collective::timed_out(name(unstarted, whole), who, board_.world_rank(rank_), limit));
    }

    void report_leavers(std::uint64_t unstarted, const Whole* whole) const {
        for (int r = 0; r < board_.size(); ++r) {
            if (!board_.presence(r).left.load(std::memory_order_acquire)) continue;
            // It may have started the collective, seen it complete, and left since.
            if (board_.done(unstarted) || board_.arrived(unstarted, r)) continue;
            return board_.world().fail(collective::left_early(name(unstarted, whole), board_.world_rank(r)));
        }
    }

    /// Ends the world if a rank is dead that collective n, which is waited for, still needs. Asks the system.
    void report_dead(std::uint64_t unstarted, std::uint64_t n, const Whole* whole) const {
        for (int r = 0; r < board_.size(); ++r) {
            // If it is busy, it died in the middle of some work, possibly on another rank's share.
            const auto is_needed = [&] {
                return !board_.done(unstarted) && (!board_.arrived(unstarted, r) || !share_is_done(n, r) || is_busy(r));
            };
            const int culprit = board_.world_rank(r);
            if (!is_needed() || board_.world().alive(culprit)) continue;
            if (!is_needed()) continue;  // it has done its part, and left, during the system call
            return board_.world().fail(collective::died(name(unstarted, whole), culprit));
        }
    }

private:
    bool is_busy(int rank) const noexcept { return board_.presence(rank).busy.load(std::memory_order_acquire) != 0; }
    bool share_is_done(std::uint64_t n, int rank) const noexcept { return board_.share(n, rank).done.load(std::memory_order_acquire) > n; }

    Board& board_;
    const int rank_;
};

}  // namespace gradsync::inline v0_2::shared_memory
