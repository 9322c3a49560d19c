// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <memory>

#include "flight_recorder.hpp"
#include "world.hpp"

namespace gradsync::inline v0_2::collective {

/// Memory made by an engine. Ownership is shared; the last copy frees it.
using Memory = Shared<void>;

/// Takes ownership of a buffer with a `data()`.
template <class Buffer>
Memory memory_of(Buffer buffer) {
    const auto kept = Shared<Buffer>::make(std::move(buffer));
    return {kept, kept->data()};
}

/// The new communicator of one rank after a split.
struct Group {
    std::size_t split = 0;  ///< number of the split on the parent, the same on all of its ranks
    int color = 0;
    List<int> members = {};  ///< the parent's ranks, in their new order
    int rank = 0;            ///< this rank's index among them

    /// Adds a rank of the parent. `self`: it is the calling rank.
    void add(int member, bool self) {
        if (self) rank = static_cast<int>(members.size());
        members.push_back(member);
    }
    /// A group of all ranks of a parent of `size` ranks.
    static Group of_all(int size, int rank) {
        Group group;
        for (int r = 0; r < size; ++r) group.add(r, r == rank);
        return group;
    }
};

/// Gives the members of a new group the object that they share, if they are threads of one process. `Pointer` is a
/// shared pointer. Not thread-safe.
template <class Pointer>
class Meetings {
public:
    /// Returns the object that the members of `group`, a group of the communicator `parent`, share. The first caller
    /// makes it; it is forgotten once all have it.
    template <class Make>
    Pointer meet(const void* parent, const Group& group, Make&& make) {
        auto meeting = meetings_.begin();
        while (meeting != meetings_.end() &&
               !(meeting->parent == parent && meeting->split == group.split && meeting->color == group.color))
            ++meeting;
        if (meeting == meetings_.end()) {
            meetings_.push_back({parent, group.split, group.color, make(), 0});
            meeting = meetings_.end() - 1;
        }
        Pointer found = meeting->shared;
        if (++meeting->arrived == group.members.size())
            meetings_.erase_if([&](const Meeting& one) { return &one == meeting; });
        return found;
    }

private:
    struct Meeting {
        const void* parent;
        std::size_t split;
        int color;
        Pointer shared;
        std::size_t arrived;
    };

    List<Meeting> meetings_;
};

/// One rank's place in a communicator, and its time limit.
class Member {
public:
    /// The world rank of each rank of a communicator. Ranks that are threads may share it.
    using WorldRanks = Shared<const List<int>>;

    Member(WorldRanks world_ranks, int rank, std::chrono::nanoseconds timeout) noexcept
        : world_ranks_(std::move(world_ranks)), rank_(rank), timeout_(gradsync::detail::clamp_timeout(timeout)) {}
    Member(List<int> world_ranks, int rank, std::chrono::nanoseconds timeout)
        : Member(WorldRanks::make(std::move(world_ranks)), rank, timeout) {}
    Member& operator=(Member&&) = delete;

    int rank() const noexcept { return rank_; }
    int size() const noexcept { return static_cast<int>(world_ranks_->size()); }
    int world_rank(int rank) const noexcept { return (*world_ranks_)[rank]; }
    int own_world_rank() const noexcept { return world_rank(rank_); }
    const WorldRanks& world_ranks() const noexcept { return world_ranks_; }
    List<int> world_ranks_of(const Group& group) const {
        List<int> ranks;
        for (const int member : group.members) ranks.push_back(world_rank(member));
        return ranks;
    }

    std::chrono::nanoseconds timeout() const noexcept { return timeout_.load(std::memory_order_relaxed); }
    void set_timeout(std::chrono::nanoseconds limit) noexcept {
        timeout_.store(gradsync::detail::clamp_timeout(limit), std::memory_order_relaxed);
    }

    /// Returns a number for a split, or for another object that all ranks create at the same place in the program.
    std::size_t next_number() noexcept { return numbers_++; }

    /// Records this rank's collectives, for its errors; null unless asked for.
    FlightRecorder* flights() const noexcept { return flights_.get(); }
    void record_flights() {
        if (!flights_) flights_ = std::make_unique<FlightRecorder>(own_world_rank());
    }

protected:
    ~Member() = default;

private:
    const WorldRanks world_ranks_;
    const int rank_;
    std::atomic<std::chrono::nanoseconds> timeout_;
    std::size_t numbers_ = 0;
    std::unique_ptr<FlightRecorder> flights_;
};

}  // namespace gradsync::inline v0_2::collective
