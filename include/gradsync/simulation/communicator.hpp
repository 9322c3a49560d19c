// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "../collective/call.hpp"
#include "../collective/engine.hpp"
#include "../collective/failures.hpp"
#include "../collective/shared_memory/chunks.hpp"
#include "../core/clock.hpp"
#include "../core/shard_range.hpp"
#include "network.hpp"
#include "simulation.hpp"

namespace gradsync::inline v0_2::simulation {

using collective::Call;

/// The collectives of a group of ranks: which rank has started which, and when they end. A collective begins when the last rank has started
/// it and its links are free. Its results are computed at that last start already, because no rank may read them before it is complete. All
/// calls need the scheduler's lock.
class Communicator : public std::enable_shared_from_this<Communicator> {
public:
    Communicator(std::shared_ptr<Simulation> simulation, std::vector<int> world_ranks)
        : simulation_(std::move(simulation)),
          world_ranks_(std::move(world_ranks)),
          route_(simulation_->network.route(world_ranks_)),
          number_(simulation_->communicators++),
          next_(world_ranks_.size()),
          gone_(world_ranks_.size()),
          worker_(world_ranks_.size()) {}

    Simulation& simulation() const noexcept { return *simulation_; }
    const std::shared_ptr<Simulation>& shared_simulation() const noexcept { return simulation_; }
    int size() const noexcept { return static_cast<int>(world_ranks_.size()); }
    int world_rank(int rank) const noexcept { return world_ranks_[static_cast<std::size_t>(rank)]; }

    /// Starts the next collective of `rank`; returns its number.
    std::uint64_t arrive(int rank, const Call& call) {
        const auto r = static_cast<std::size_t>(rank);
        const std::uint64_t n = next_[r]++;
        while (first_ + slots_.size() <= n) slots_.emplace_back();
        Slot& slot = at(n);
        const double now = simulation_->scheduler.now(world_rank(rank));
        if (slot.arrived == 0) {
            slot.calls.resize(next_.size());
            slot.arrivals.assign(next_.size(), Scheduler::endless);
            slot.name = call;
            slot.first = now;
        }
        slot.first = gradsync::detail::smaller(slot.first, now);
        slot.ready = gradsync::detail::larger(slot.ready, now);
        slot.calls[r] = call;
        slot.arrivals[r] = now;
        if (++slot.arrived == slot.calls.size()) {
            complete(n, slot);
        } else {
            for (std::size_t other = 0; other < gone_.size(); ++other)
                if (gone_[other] && next_[other] <= n)
                    simulation_->fail(collective::left_early(name_of(slot.name, n), world_ranks_[other]));
        }
        return n;
    }

    /// Is collective n complete by this rank's clock? Asking takes no virtual time.
    bool is_through(std::uint64_t n, int rank) const {
        const Slot& slot = slots_[n - first_];
        return slot.placed && slot.end <= simulation_->scheduler.now(world_rank(rank));
    }
    bool is_placed(std::uint64_t n) const { return slots_[n - first_].placed; }
    double end(std::uint64_t n) const { return slots_[n - first_].end; }
    const Call& name(std::uint64_t n) const { return slots_[n - first_].name; }

    /// Blocks until the end of collective n is known. Returns false if the simulation has failed, or if the end is past the limit, which
    /// fails the simulation.
    bool await(Scheduler::Lock& lock, std::uint64_t n, int rank, std::chrono::nanoseconds limit) {
        const double deadline = simulation_->scheduler.now(world_rank(rank)) + std::chrono::duration<double>(limit).count();
        const Waiter waiter{rank, deadline, limit};
        while (!simulation_->failed() && !at(n).placed) {
            at(n).waiters.push_back(waiter);
            simulation_->block(lock, world_rank(rank), {deadline, [this, n, waiter] { return too_late(n, waiter); }});
        }
        if (!at(n).placed) return false;
        if (at(n).end > deadline) simulation_->fail(too_late(n, waiter));
        return at(n).end <= deadline;
    }

    /// Blocks until any collective has got its place on the links. `n`: the collective that the rank polls for.
    void nap(Scheduler::Lock& lock, std::uint64_t n, int rank, std::chrono::nanoseconds limit) {
        simulation_->nap(lock, world_rank(rank), [this, waiter = Waiter{rank, simulation_->scheduler.now(world_rank(rank)), limit}, n] {
            return too_late(n, waiter);
        });
    }

    /// Ends one rank's interest in collective n.
    void retire(std::uint64_t n) {
        at(n).retired += 1;
        while (!slots_.empty() && slots_.front().retired == next_.size()) {
            slots_.pop_front();
            ++first_;
        }
    }

    /// `rank` will start no more collectives here.
    void leave(int rank) {
        const auto r = static_cast<std::size_t>(rank);
        gone_[r] = true;
        if (next_[r] >= first_ && next_[r] - first_ < slots_.size() && slots_[next_[r] - first_].arrived != 0)
            simulation_->fail(collective::left_early(name_of(at(next_[r]).name, next_[r]), world_ranks_[r]));
    }

    /// The communicator that the members of a group share. The first member to ask makes it.
    std::shared_ptr<Communicator> meet(const collective::Group& group) {
        for (std::size_t i = 0; i < meetings_.size(); ++i) {
            Meeting& meeting = meetings_[i];
            if (meeting.split != group.split || meeting.color != group.color) continue;
            std::shared_ptr<Communicator> found = meeting.communicator;
            if (++meeting.arrived == group.members.size()) meetings_.erase(meetings_.begin() + static_cast<std::ptrdiff_t>(i));
            return found;
        }
        std::vector<int> members;
        for (const int r : group.members) members.push_back(world_rank(r));
        auto made = std::make_shared<Communicator>(simulation_, std::move(members));
        if (group.members.size() > 1) meetings_.push_back({group.split, group.color, made, 1});
        return made;
    }

private:
    struct Waiter {
        int rank;
        double deadline;
        std::chrono::nanoseconds limit;
    };
    struct Slot {
        std::vector<Call> calls;  ///< by rank; empty once all have arrived
        std::vector<double> arrivals;
        Call name;  ///< call of the first rank to arrive
        std::size_t arrived = 0, retired = 0;
        double first = 0, ready = 0, end = 0;
        bool placed = false;  ///< its times on the links are known
        std::vector<Waiter> waiters;
    };
    struct Meeting {
        std::size_t split;
        int color;
        std::shared_ptr<Communicator> communicator;
        std::size_t arrived;
    };

    Slot& at(std::uint64_t n) { return slots_[n - first_]; }

    /// Every rank has started collective n: checks the calls, moves the data, and schedules its place on the links.
    void complete(std::uint64_t n, Slot& slot) {
        if (const int misfit = collective::first_misfit(slot.calls); misfit >= 0) {
            simulation_->fail(collective::mismatch(n, slot.calls, misfit, [this](int r) { return world_rank(r); }));
            return;
        }
        move(slot.calls);
        const std::size_t bytes = whole_count(slot.calls) * size_of(slot.calls[0].dtype);
        slot.calls = {};
        simulation_->scheduler.add_event(slot.ready, [self = shared_from_this(), n, bytes] { self->place(n, bytes); });
    }

    /// No rank can start anything earlier any more, so collectives take the links in the order of readiness.
    void place(std::uint64_t n, std::size_t bytes) {
        Slot& slot = at(n);
        const Network::Slot times = simulation_->network.reserve(route_, slot.name.operation, bytes, slot.ready);
        simulation_->records.push_back({number_, n, slot.name.operation, bytes, slot.first, slot.ready, times.start, times.end});
        slot.end = times.end;
        slot.placed = true;
        for (const Waiter& w : slot.waiters)
            simulation_->scheduler.wake(world_rank(w.rank), gradsync::detail::smaller(slot.end, w.deadline));
        slot.waiters.clear();
        simulation_->wake_nappers(slot.ready);
    }

    void move(const std::vector<Call>& calls) {
        const Call& first = calls[0];
        if (first.operation == collective::Operation::barrier) return;
        if (simulation_->is_unmoved(first.in_count != 0 ? first.in : first.out)) return;
        const std::size_t count = whole_count(calls);
        const bool anybody = first.operation == collective::Operation::all_reduce || first.operation == collective::Operation::reduce ||
                             first.operation == collective::Operation::broadcast;
        if (anybody && count != 0) worker_.run(calls, 0, {0, count});
        for (int owner = 0; owner < size() && !anybody; ++owner)
            if (const ElementRange shard = shard_range(count, size(), owner); shard.size() != 0) worker_.run(calls, owner, shard);
    }

    /// Waiter w has waited for collective n up to its deadline. The ranks that arrived after it are to blame, if there are any.
    collective::Failure too_late(std::uint64_t n, const Waiter& w) {
        const Slot& slot = at(n);
        collective::Late late;
        for (std::size_t r = 0; r < slot.arrivals.size(); ++r)
            if (slot.arrivals[r] > w.deadline) late.ranks.push_back(world_ranks_[r]);
        return collective::timed_out(name_of(slot.name, n), late, world_rank(w.rank), w.limit);
    }

    std::shared_ptr<Simulation> simulation_;
    std::vector<int> world_ranks_;
    Network::Route route_;
    int number_;
    std::deque<Slot> slots_;  ///< not retired by all ranks yet; the first is collective `first_`
    std::uint64_t first_ = 0;
    std::vector<std::uint64_t> next_;  ///< by rank: number of its next collective
    std::vector<bool> gone_;
    std::vector<Meeting> meetings_;
    shared_memory::ChunkWorker worker_;
};

}  // namespace gradsync::inline v0_2::simulation
