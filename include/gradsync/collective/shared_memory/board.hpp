// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../world.hpp"
#include "chunks.hpp"

namespace gradsync::inline v0_2::shared_memory {

using collective::World;

/// Where the ranks of one communicator meet. Collective number n of every rank lies in slot n % slots: each rank
/// publishes its Call in a cell of its own; once all have, the chunks of the collective are worked on by whoever
/// has time, taken by ticket. A slot is used again once every rank has retired its collective.
///
/// It is a view of memory that all ranks see, threads of one process or processes that have mapped it: each process has
/// a Board of its own. It holds no buffers and owns nothing of the ranks. All members but the construction are
/// for concurrent use.
class Board {
public:
    static constexpr std::size_t slots = 512;  ///< collectives in flight before a start has to wait

    /// `world_ranks[r]` is the world rank of this board's rank r. `memory`: `bytes(ranks)` bytes that all ranks see,
    /// zeroed by whoever made them, aligned to 64; the board keeps them.
    Board(std::shared_ptr<World> world, std::vector<int> world_ranks, std::shared_ptr<std::byte> memory)
        : world_(std::move(world)), world_ranks_(std::move(world_ranks)), memory_(std::move(memory)) {
        const std::size_t ranks = world_ranks_.size();
        // Zeroes are the first values of all that lies there: no rank has to construct it, none has to wait for that.
        presences_ = reinterpret_cast<Presence*>(memory_.get());
        cells_ = reinterpret_cast<Cell*>(presences_ + ranks);
        shares_ = reinterpret_cast<Share*>(cells_ + slots * ranks);
    }

    static constexpr std::size_t bytes(std::size_t ranks) noexcept {
        return ranks * (sizeof(Presence) + slots * (sizeof(Cell) + sizeof(Share)));
    }

    int size() const noexcept { return static_cast<int>(world_ranks_.size()); }
    World& world() const noexcept { return *world_; }
    const std::shared_ptr<World>& shared_world() const noexcept { return world_; }
    int world_rank(int rank) const noexcept { return world_ranks_[static_cast<std::size_t>(rank)]; }

    /// One rank's part of one collective.
    struct alignas(64) Cell {
        std::atomic<std::uint64_t> arrived{0};  ///< number of the collective + 1, once `call` is valid
        Call call;                              ///< with addresses as the ranks' AddressSpace encodes them
    };

    /// One rank's share of one collective. Its owner works on it alone unless it is late: what only workers touch
    /// lies apart from what everybody waits for, and a share that nobody else takes from never leaves its owner's cache.
    struct Share {
        alignas(64) std::atomic<std::uint32_t> next{0};  ///< chunk to be taken next
        std::atomic<std::uint32_t> chunks_done{0};
        alignas(64) std::atomic<std::uint64_t> done{0};  ///< number of the collective + 1, once the share is complete
    };

    /// What the others want to know of a rank.
    struct alignas(64) Presence {
        std::atomic<std::uint64_t> retired{0};  ///< it needs no slot of a collective below this number
        std::atomic<int> busy{0};               ///< it touches other ranks' buffers just now
        std::atomic<bool> left{false};          ///< it will start nothing more
    };

    Cell& cell(std::uint64_t n, int rank) noexcept { return cells_[(n % slots) * world_ranks_.size() + static_cast<std::size_t>(rank)]; }
    Share& share(std::uint64_t n, int rank) noexcept { return shares_[(n % slots) * world_ranks_.size() + static_cast<std::size_t>(rank)]; }
    Presence& presence(int rank) noexcept { return presences_[rank]; }

    /// Has this rank started collective n? (While the slot is still n's.)
    bool arrived(std::uint64_t n, int rank) noexcept { return cell(n, rank).arrived.load(std::memory_order_acquire) == n + 1; }
    bool all_arrived(std::uint64_t n) noexcept {
        for (int r = 0; r < size(); ++r)
            if (!arrived(n, r)) return false;
        return true;
    }
    /// Is collective n complete on all ranks? Stays true when the slot is used again.
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
    std::shared_ptr<World> world_;
    std::vector<int> world_ranks_;
    std::shared_ptr<std::byte> memory_;
    Presence* presences_;
    Cell* cells_;
    Share* shares_;
};

static_assert(sizeof(Board::Cell) == 64, "a call and its flag travel in one cache line");

}  // namespace gradsync::inline v0_2::shared_memory
