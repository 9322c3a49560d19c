// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../deadline.hpp"
#include "../failures.hpp"
#include "../member.hpp"
#include "chunks.hpp"

namespace gradsync::inline v0_2::shared_memory {

using collective::World;
using gradsync::detail::Shared;

/// The shared state of the ranks of one communicator. Collective n of every rank uses slot n % slots. Each rank
/// publishes its Call in a cell of its own. Once all have, any rank with time takes chunks of the collective by ticket
/// and works on them. A slot is reused once every rank has retired its collective.
///
/// A Board is a view of memory that all ranks see: threads of one process, or processes that have mapped it.
/// Each process has its own Board. It holds no buffers and owns nothing of the ranks. All members except
/// construction are thread-safe.
class Board {
public:
    static constexpr std::size_t slots = 512;  ///< collectives in flight before a start must wait

    using WorldRanks = collective::Member::WorldRanks;

    /// `memory`: `bytes(ranks)` bytes that all ranks see, zeroed by the rank that made them, aligned to 64. The board
    /// shares ownership.
    Board(Shared<World> world, WorldRanks world_ranks, Shared<std::byte> memory)
        : world_(std::move(world)),
          world_ranks_(std::move(world_ranks)),
          ranks_(world_ranks_->size()),
          memory_(std::move(memory)) {
        // Zeros are the initial values of everything in this memory: no rank must construct
        // it, or wait for construction.
        presences_ = reinterpret_cast<Presence*>(memory_.get());
        cells_ = reinterpret_cast<Cell*>(presences_ + ranks_);
        shares_ = reinterpret_cast<Share*>(cells_ + slots * ranks_);
    }

    static constexpr std::size_t bytes(std::size_t ranks) noexcept {
        return ranks * (sizeof(Presence) + slots * (sizeof(Cell) + sizeof(Share)));
    }

    int size() const noexcept { return static_cast<int>(ranks_); }
    World& world() const noexcept { return *world_; }
    const Shared<World>& shared_world() const noexcept { return world_; }
    const WorldRanks& world_ranks() const noexcept { return world_ranks_; }
    int world_rank(int rank) const noexcept { return (*world_ranks_)[rank]; }

    /// One rank's part of one collective.
    struct alignas(64) Cell {
        std::atomic<std::uint64_t> arrived{0};  ///< number of the collective + 1, once `call` is valid
        Call call;                              ///< its addresses are encoded as the Space of the ranks' seats says
    };

    /// One rank's share of one collective. Only its owner works on it, unless the owner is late.
    /// Data of workers is apart from data that all ranks wait for, and a share that no other rank takes chunks
    /// of never leaves its owner's cache.
    struct Share {
        alignas(64) std::atomic<std::uint32_t> next{0};  ///< next chunk to take
        std::atomic<std::uint32_t> chunks_done{0};
        alignas(64) std::atomic<std::uint64_t> done{0};  ///< number of the collective + 1, once the share is complete
    };

    /// State of one rank that the others read.
    struct alignas(64) Presence {
        std::atomic<std::uint64_t> retired{0};  ///< this rank no longer needs slots of collectives below this number
        std::atomic<int> busy{0};               ///< nonzero while this rank touches other ranks' buffers
        std::atomic<bool> left{false};          ///< this rank starts nothing more
    };

    Cell& cell(std::uint64_t n, int rank) noexcept {
        return cells_[(n % slots) * ranks_ + static_cast<std::size_t>(rank)];
    }
    Share& share(std::uint64_t n, int rank) noexcept {
        return shares_[(n % slots) * ranks_ + static_cast<std::size_t>(rank)];
    }
    Presence& presence(int rank) noexcept { return presences_[rank]; }

    /// Has this rank started collective n? Valid while the slot is still n's.
    bool arrived(std::uint64_t n, int rank) noexcept {
        return cell(n, rank).arrived.load(std::memory_order_acquire) == n + 1;
    }
    bool all_arrived(std::uint64_t n) noexcept {
        for (int r = 0; r < size(); ++r)
            if (!arrived(n, r)) return false;
        return true;
    }
    /// Is collective n complete on all ranks? Stays true when the slot is reused.
    bool done(std::uint64_t n) noexcept {
        for (int r = 0; r < size(); ++r)
            if (share(n, r).done.load(std::memory_order_acquire) <= n) return false;
        return true;
    }

    void set_share_done(std::uint64_t n, int rank) noexcept {
        share(n, rank).done.store(n + 1, std::memory_order_release);
        world_->wait_queue.ring();
    }

private:
    Shared<World> world_;
    WorldRanks world_ranks_;
    const std::size_t ranks_;
    Shared<std::byte> memory_;
    Presence* presences_;
    Cell* cells_;
    Share* shares_;
};

static_assert(sizeof(Board::Cell) == 64, "a call and its flag travel in one cache line");

/// A collective of another seat that a collective of this seat is a piece of.
struct Whole {
    Call call;
    std::uint64_t number = 0;
};

/// Finds the ranks that hold up a collective, as far as one rank at a board can see, and ends the world for it.
/// `whole`: the collective that this one is a piece of, for messages; null if it is no piece. Thread-safe.
class BoardFailureDetector {
    using Late = collective::Late;

public:
    BoardFailureDetector(Board& board, int rank) noexcept : board_(board), rank_(rank) {}

    /// "all_reduce(sum, f32, 8 elements), collective #3"; this rank started collective n.
    [[gnu::cold, gnu::noinline]] std::string name(std::uint64_t n, const Whole* whole = nullptr) const {
        return whole ? collective::name_of(whole->call, whole->number)
                     : collective::name_of(board_.cell(n, rank_).call, n);
    }

    /// The ranks that hold up collective n: those that did not start it. If all did: those in the middle of some work,
    /// possibly on another rank's share. If there are none: those whose shares are not done,
    /// since no waiting rank has helped them.
    [[gnu::cold, gnu::noinline]] Late late(std::uint64_t n) const {
        Late late;
        if (board_.done(n)) return late;
        for (int reason = 0; reason < 3 && late.ranks.empty(); ++reason) {
            if (reason > 0) late.did = Late::Did::not_go_on;
            for (int r = 0; r < board_.size(); ++r)
                if (reason == 0 ? !board_.arrived(n, r)
                                : r != rank_ && (reason == 1 ? is_busy(r) : !share_is_done(n, r)))
                    late.ranks.push_back(board_.world_rank(r));
        }
        return late;
    }

    // In the functions below, `unstarted` is the first collective, up to the one that this rank waits for, that some
    // rank may not have started; if there is none, the one that it waits for.

    /// Called repeatedly once the time limit has passed, `by` ago. Several ranks may all wait for one of them, in
    /// another communicator: they know more, and get time to report first.
    [[gnu::cold, gnu::noinline]] void report_timeout(std::uint64_t unstarted, const Whole* whole,
                                                     collective::Deadline& deadline, std::chrono::nanoseconds by,
                                                     std::chrono::nanoseconds limit) const {
        Late who = late(unstarted);
        if (who.ranks.size() > 1 && collective::Deadline::too_early(by, limit, 2)) return;
        if (whole != nullptr) who.did = Late::Did::not_go_on;
        if (who.did == Late::Did::not_go_on && !who.ranks.empty() &&
            deadline.is_recent_suspect(who.ranks.front(), limit))
            return;
        board_.world().fail(collective::timed_out(name(unstarted, whole), who, board_.world_rank(rank_), limit));
    }

    [[gnu::cold, gnu::noinline]] void report_leavers(std::uint64_t unstarted, const Whole* whole) const {
        for (int r = 0; r < board_.size(); ++r) {
            if (!board_.presence(r).left.load(std::memory_order_acquire)) continue;
            // It may have started the collective, seen it complete, and left since.
            if (board_.done(unstarted) || board_.arrived(unstarted, r)) continue;
            return board_.world().fail(collective::left_early(name(unstarted, whole), board_.world_rank(r)));
        }
    }

    /// Ends the world because some ranks do not retire collective n, which is complete: at the time limit, or (`limit`
    /// is 0) if one of them is dead. Asks the system.
    [[gnu::cold, gnu::noinline]] void report_holders(std::uint64_t n, std::chrono::nanoseconds limit) const {
        Late who{.did = Late::Did::not_go_on};
        for (int r = 0; r < board_.size(); ++r) {
            const Board::Presence& presence = board_.presence(r);
            if (r == rank_ || presence.left.load(std::memory_order_acquire) ||
                presence.retired.load(std::memory_order_acquire) > n)
                continue;
            who.ranks.push_back(board_.world_rank(r));
            if (limit == limit.zero() && !board_.world().alive(who.ranks.back()))
                return board_.world().fail(collective::died(name(n), who.ranks.back()));
        }
        if (limit != limit.zero() && !who.ranks.empty())
            board_.world().fail(collective::timed_out(name(n), who, board_.world_rank(rank_), limit));
    }

    /// Ends the world if a rank is dead that collective n, for which this rank waits, still needs. Asks the system.
    [[gnu::cold, gnu::noinline]] void report_dead(std::uint64_t unstarted, std::uint64_t n, const Whole* whole) const {
        for (int r = 0; r < board_.size(); ++r) {
            // If it is busy, it died in the middle of some work, possibly on another rank's share.
            const auto is_needed = [&] {
                return !board_.done(unstarted) && (!board_.arrived(unstarted, r) || !share_is_done(n, r) || is_busy(r));
            };
            const int culprit = board_.world_rank(r);
            if (!is_needed() || board_.world().alive(culprit)) continue;
            if (!is_needed()) continue;  // it did its part and left during the system call
            return board_.world().fail(collective::died(name(unstarted, whole), culprit));
        }
    }

private:
    bool is_busy(int rank) const noexcept { return board_.presence(rank).busy.load(std::memory_order_acquire) != 0; }
    bool share_is_done(std::uint64_t n, int rank) const noexcept {
        return board_.share(n, rank).done.load(std::memory_order_acquire) > n;
    }

    Board& board_;
    const int rank_;
};

}  // namespace gradsync::inline v0_2::shared_memory
