// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <sys/mman.h>

#include <new>

#include "../collective/engine.hpp"
#include "../collective/in_flight.hpp"
#include "../collective/shared_memory/chunks.hpp"
#include "simulation.hpp"

namespace gradsync::inline v0_2::simulation {

using collective::Call;

/// The collectives of a group of ranks: which rank has started which, and when they end. A collective begins when the
/// last rank has started it and its links are free. Its results are computed already at that last start, because no
/// rank may read them before it is complete. All calls require the scheduler's lock.
class Communicator : public std::enable_shared_from_this<Communicator> {
public:
    Communicator(std::shared_ptr<Simulation> simulation, List<int> world_ranks)
        : simulation_(std::move(simulation)), world_ranks_(std::make_shared<const List<int>>(std::move(world_ranks))) {}

    Simulation& simulation() const noexcept { return *simulation_; }
    const collective::Member::WorldRanks& world_ranks() const noexcept { return world_ranks_; }
    int size() const noexcept { return static_cast<int>(world_ranks_->size()); }
    int world_rank(int rank) const noexcept { return (*world_ranks_)[static_cast<std::size_t>(rank)]; }

    /// Starts the next collective of `rank`; returns its number.
    std::uint64_t arrive(int rank, const Call& call) {
        const auto r = static_cast<std::size_t>(rank);
        const std::uint64_t n = next_[r]++;
        if (n == started_.next()) started_.add([](Started& started, std::uint64_t) { started = {}; });
        Started& started = started_[n];
        const double now = simulation_->scheduler.now(world_rank(rank));
        if (started.arrived == 0) {
            started.calls.resize(next_.size());
            started.arrivals.assign(next_.size(), Scheduler::endless);
            started.name = call;
            started.times = {number_, n, call.operation, 0, now, now};
        }
        started.times.first = detail::smaller(started.times.first, now);
        started.times.ready = detail::larger(started.times.ready, now);
        started.calls[r] = call;
        started.arrivals[r] = now;
        if (++started.arrived == started.calls.size()) {
            complete(n, started);
        } else {
            for (std::size_t other = 0; other < gone_.size(); ++other)
                if (gone_[other] && next_[other] <= n)
                    simulation_->fail(collective::left_early(name_of(started.name, n), (*world_ranks_)[other]));
        }
        return n;
    }

    /// Is collective n complete on this rank's clock? Asking takes no virtual time.
    bool is_through(std::uint64_t n, int rank) const {
        return is_placed(n) && end(n) <= simulation_->scheduler.now(world_rank(rank));
    }
    bool is_placed(std::uint64_t n) const { return started_[n].placed; }
    double end(std::uint64_t n) const { return started_[n].times.end; }
    const Call& name(std::uint64_t n) const { return started_[n].name; }

    /// Blocks until the end of collective n is known. Returns false if the simulation has failed. An end past the limit
    /// also fails the simulation.
    bool await(Scheduler::Lock& lock, std::uint64_t n, int rank, std::chrono::nanoseconds limit) {
        const int own = world_rank(rank);
        const double deadline = simulation_->scheduler.now(own) + std::chrono::duration<double>(limit).count();
        const auto complain = [=, this] { return too_late(n, own, deadline, limit); };
        while (!simulation_->failed() && !is_placed(n)) {
            started_[n].waiters.push_back(own);
            simulation_->block(lock, own, {deadline, complain});
        }
        if (!is_placed(n)) return false;
        if (end(n) > deadline) simulation_->fail(complain());
        return end(n) <= deadline;
    }

    /// Blocks until any collective has got its place on the links. `n`: the collective that the rank polls for.
    void nap(Scheduler::Lock& lock, std::uint64_t n, int rank, std::chrono::nanoseconds limit) {
        const int own = world_rank(rank);
        const double now = simulation_->scheduler.now(own);
        simulation_->nappers.push_back(own);
        simulation_->block(lock, own, {Scheduler::endless, [=, this] { return too_late(n, own, now, limit); }});
    }

    /// Ends one rank's interest in collective n.
    void retire(std::uint64_t n) {
        started_[n].retired += 1;
        started_.retire([this](const Started& oldest) { return oldest.retired == next_.size(); });
    }

    /// Declares that `rank` starts no more collectives here.
    void leave(int rank) {
        const auto r = static_cast<std::size_t>(rank);
        gone_[r] = true;
        if (next_[r] < started_.next())
            simulation_->fail(collective::left_early(name_of(started_[next_[r]].name, next_[r]), world_rank(rank)));
    }

    /// The communicator that the members of a group share. The first caller makes it.
    std::shared_ptr<Communicator> meet(const collective::Group& group, List<int> members) {
        return meetings_.meet(this, group,
                              [&] { return std::make_shared<Communicator>(simulation_, std::move(members)); });
    }

private:
    struct Started {
        std::vector<Call> calls;  ///< by rank; empty once all have arrived
        std::vector<double> arrivals;
        Call name;  ///< call of the first rank to arrive
        std::size_t arrived = 0, retired = 0;
        CollectiveRecord times;
        bool placed = false;  ///< its times on the links are known
        List<int> waiters;    ///< world ranks that wait for it
    };
    /// Every rank has started collective n: checks the calls, moves the data, and schedules its place on the links.
    void complete(std::uint64_t n, Started& started) {
        if (const int misfit = collective::first_misfit(started.calls); misfit >= 0) {
            simulation_->fail(collective::mismatch(n, started.calls, misfit, *world_ranks_));
            return;
        }
        move(started.calls);
        started.times.bytes = whole_count(started.calls) * size_of(started.calls[0].dtype);
        started.calls = {};
        simulation_->scheduler.add_event(started.times.ready, [self = shared_from_this(), n] { self->place(n); });
    }

    /// Places collective n on the links. No rank can start anything earlier any more, so collectives take links in the
    /// order of readiness.
    void place(std::uint64_t n) {
        Started& started = started_[n];
        simulation_->network.reserve(route_, started.times);
        simulation_->records.push_back(started.times);
        started.placed = true;
        simulation_->wake(started.waiters, started.times.end);
        simulation_->wake(simulation_->nappers, started.times.ready);
    }

    void move(const std::vector<Call>& calls) {
        const Call& first = calls[0];
        if (first.operation == collective::Operation::barrier) return;
        if (simulation_->is_unmoved(first.in_count != 0 ? first.in : first.out)) return;
        const std::size_t count = whole_count(calls);
        const bool anybody = !has_shards(first.operation);
        if (anybody && count != 0) worker_.run(calls, 0, {0, count});
        for (int owner = 0; owner < size() && !anybody; ++owner)
            if (const ElementRange shard = shard_range(count, size(), owner); shard.size() != 0)
                worker_.run(calls, owner, shard);
    }

    /// World rank `own` has waited for collective n up to its deadline. Ranks that arrived after
    /// it are to blame, if there are any.
    collective::Failure too_late(std::uint64_t n, int own, double deadline, std::chrono::nanoseconds limit) const {
        const Started& started = started_[n];
        collective::Late late;
        for (std::size_t r = 0; r < started.arrivals.size(); ++r)
            if (started.arrivals[r] > deadline) late.ranks.push_back(world_rank(static_cast<int>(r)));
        return collective::timed_out(name_of(started.name, n), late, own, limit);
    }

    std::shared_ptr<Simulation> simulation_;
    collective::Member::WorldRanks world_ranks_;
    Network::Route route_ = simulation_->network.route(*world_ranks_);
    int number_ = simulation_->communicators++;
    collective::InFlight<Started> started_;  ///< not yet retired by all ranks
    /// By rank: number of its next collective.
    std::vector<std::uint64_t> next_ = std::vector<std::uint64_t>(world_ranks_->size());
    std::vector<bool> gone_ = std::vector<bool>(world_ranks_->size());
    collective::Meetings<std::shared_ptr<Communicator>> meetings_;
    shared_memory::ChunkWorker worker_{world_ranks_->size()};
};

/// One rank's side of a communicator, in virtual time. Only the rank's own thread may start, test,
/// wait, split or let time pass.
class Engine final : public collective::Member {
public:
    Engine(std::shared_ptr<Communicator> communicator, int rank, std::chrono::nanoseconds timeout)
        : Member(communicator->world_ranks(), rank, timeout), communicator_(std::move(communicator)) {}
    ~Engine() {
        const auto lock = scheduler().lock();
        communicator_->leave(rank());
    }

    Simulation& world() const noexcept { return communicator_->simulation(); }

    std::uint64_t start(const Call& call, ShardStep*) {
        const auto lock = locked_by_own_thread();
        if (world().failed()) throw_failure(call.operation);
        const std::uint64_t n = communicator_->arrive(rank(), call);
        if (world().failed()) throw_failure(call.operation);
        return n;
    }

    bool test(std::uint64_t n) {
        auto lock = locked_by_own_thread();
        if (!world().failed() && !communicator_->is_placed(n)) {
            // Other ranks may still act before the time of this rank's clock.
            if (!scheduler().settle(own()) && !world().failed()) scheduler().yield(lock, own());
            if (!world().failed()) scheduler().settle(own());
        }
        if (communicator_->is_through(n, rank())) {
            communicator_->retire(n);
            return true;
        }
        if (world().failed()) throw_failure(communicator_->name(n).operation);
        if (++polls_ < polls_of_a_spin) return false;
        // A rank that only polls counts as waiting.
        polls_ = 0;
        if (communicator_->is_placed(n)) scheduler().advance_to(own(), communicator_->end(n));
        else communicator_->nap(lock, n, rank(), timeout());
        return false;
    }

    void wait(std::uint64_t n) {
        auto lock = locked_by_own_thread();
        if (!communicator_->is_through(n, rank())) {
            if (!communicator_->await(lock, n, rank(), timeout())) throw_failure(communicator_->name(n).operation);
            scheduler().advance_to(own(), communicator_->end(n));
            polls_ = 0;
        }
        communicator_->retire(n);
    }

    void abandon(std::uint64_t n) noexcept {
        const auto lock = scheduler().lock();
        if (communicator_->is_through(n, rank())) return communicator_->retire(n);
        if (!world().failed()) world().fail(collective::abandoned(name_of(communicator_->name(n), n), own()));
    }

    void fail(const collective::Failure& failure) noexcept {
        const auto lock = scheduler().lock();
        world().fail(failure);
    }

    void progress() noexcept {
        auto lock = scheduler().lock();
        if (scheduler().is_thread_of(own())) scheduler().yield(lock, own());
    }
    std::chrono::nanoseconds progress_time() const noexcept { return {}; }

    void set_timeout(std::chrono::nanoseconds limit) noexcept {
        const auto lock = scheduler().lock();
        Member::set_timeout(limit);
        world().set_limit(own(), limit);
    }

    std::shared_ptr<Engine> split(const collective::Group& group) {
        const auto lock = locked_by_own_thread();
        return std::make_shared<Engine>(communicator_->meet(group, world_ranks_of(group)), group.rank, timeout());
    }

    /// Zeroed memory that uses no physical memory until it is written, so that thousands
    /// of ranks can each have buckets.
    collective::Memory allocate(std::size_t bytes) {
        if (bytes == 0) return {};
        void* const data =
            ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (data == MAP_FAILED) throw std::bad_alloc();
        const auto take_back = [communicator = communicator_, bytes](void* region) {
            communicator->simulation().regions.remove(region);
            ::munmap(region, bytes);
        };
        collective::Memory memory(std::shared_ptr<void>(data, take_back));
        world().regions.add(data, bytes);
        return memory;
    }

    // ---------------------------------------------------------------------------------------------------- virtual time

    double now() const {
        const auto lock = scheduler().lock();
        return scheduler().now(own());
    }
    void pass(double seconds) {
        const auto lock = locked_by_own_thread();
        scheduler().advance_to(own(), scheduler().now(own()) + seconds);
        polls_ = 0;
    }

private:
    int own() const noexcept { return own_world_rank(); }
    Scheduler& scheduler() const noexcept { return communicator_->simulation().scheduler; }

    Scheduler::Lock locked_by_own_thread() const {
        auto lock = scheduler().lock();
        if (!scheduler().is_thread_of(own()))
            detail::raise(Errc::invalid_argument, {.operation = "SimulatedBackend", .rank = own()},
                          "a rank of a simulation has one thread, which run_simulated has started; ",
                          "let that one communicate (Progress::polls, not Progress::thread)");
        return lock;
    }

    [[noreturn]] void throw_failure(collective::Operation operation) const {
        collective::Failure failure = world().failure();
        if (failure.message.find(name_of(operation)) == std::string::npos)
            failure.message = detail::text(operation, ": ", failure.message);
        collective::raise_failure(failure, operation, own());
    }

    static constexpr int polls_of_a_spin = 100;

    std::shared_ptr<Communicator> communicator_;
    int polls_ = 0;  ///< unsuccessful polls since this rank's clock last moved
};

}  // namespace gradsync::inline v0_2::simulation
