// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <queue>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "../collective/failures.hpp"
#include "../collective/messages/transport.hpp"
#include "cost_model.hpp"

namespace gradsync::inline v0_2::simulation {

/// Virtual time. Every rank has its own thread and clock. One rank runs at a time, until its next call depends on
/// others. Then the rank with the earliest clock gets the turn; among equal clocks, the one that gave up its turn
/// first. So all runs are the same, and ranks need no locks against each other.
///
/// There are also events, which happen once no rank that may still act has an earlier clock.
///
/// All calls require the lock from `lock()`. The functions of a rank are for its own thread.
class Scheduler {
public:
    using Lock = std::unique_lock<std::mutex>;

    /// Rank 0 has the first turn.
    explicit Scheduler(int ranks) : ranks_(static_cast<std::size_t>(ranks)) {
        for (int r = 1; r < ranks; ++r) make_ready(r);
        ranks_[0].state = State::running;
        running_ = 0;
    }

    Lock lock() { return Lock(mutex_); }

    /// Makes the calling thread that of `rank`; returns when it has the turn.
    void enter(Lock& lock, int rank) {
        Rank& self = at(rank);
        self.thread = std::this_thread::get_id();
        take_turn(lock, rank);
    }
    /// The last call of this thread: passes the turn on.
    void leave(int rank) {
        at(rank).state = State::gone;
        at(rank).thread = {};
        pass_on();
    }
    bool is_thread_of(int rank) const { return at(rank).thread == std::this_thread::get_id(); }

    double now(int rank) const { return at(rank).clock; }
    /// Moves the rank's clock to `time`. Earlier actions of other ranks become visible only
    /// when the rank asks for them.
    void advance_to(int rank, double time) {
        if (time > at(rank).clock) at(rank).clock = time;
    }

    /// Runs `happen` when no rank that may still act has a clock before `time`.
    void add_event(double time, std::function<void()> happen) {
        queue_.push({time, ++sequence_, event, std::move(happen)});
    }

    /// Runs the events that are due on this rank's clock, unless another rank is behind them. Returns true if none is
    /// left and all other ranks are later: nothing new can then happen before its clock moves.
    bool settle(int rank) {
        while (!queue_.empty() && queue_.top().time <= now(rank)) {
            if (queue_.top().rank != event) return false;
            happen();
        }
        return true;
    }

    /// Gives the turn to all ranks whose clock is not later than this rank's.
    void yield(Lock& lock, int rank) {
        make_ready(rank);
        pass_on();
        take_turn(lock, rank);
    }

    /// Sleeps until another rank or an event calls `wake`.
    void block(Lock& lock, int rank) {
        at(rank).state = State::blocked;
        ++blocked_;
        pass_on();
        take_turn(lock, rank);
    }

    /// The rank that has the turn, or -1; and the number of turns so far.
    int running() const { return running_; }
    std::uint64_t turn() const { return turn_; }
    bool is_blocked(int rank) const { return at(rank).state == State::blocked; }

    /// Lets a blocked rank continue, no earlier than at `time`. No-op if it is not blocked.
    void wake(int rank, double time) {
        if (!is_blocked(rank)) return;
        --blocked_;
        advance_to(rank, time);
        make_ready(rank);
    }
    void wake_all() {
        for (std::size_t r = 0; r < ranks_.size(); ++r) wake(static_cast<int>(r), 0);
    }

    std::function<void()> on_deadlock;  ///< called when all remaining ranks are blocked; must wake at least one

    /// Later than any time.
    static constexpr double endless = 1e300;

private:
    enum class State : std::uint8_t { ready, running, blocked, gone };

    struct Rank {
        std::condition_variable turn;
        std::thread::id thread;
        double clock = 0;
        State state = State::ready;
    };
    /// A rank that is ready, or an event.
    struct Entry {
        double time;
        std::uint64_t sequence;
        int rank;
        std::function<void()> happen = {};

        /// At the same time, events come before ranks.
        bool operator>(const Entry& other) const noexcept {
            return std::tuple(time, rank != event, sequence) >
                   std::tuple(other.time, other.rank != event, other.sequence);
        }
    };
    static constexpr int event = -1;  ///< the rank of an event

    Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
    const Rank& at(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }

    void make_ready(int rank) {
        at(rank).state = State::ready;
        queue_.push({at(rank).clock, ++sequence_, rank});
    }

    void happen() {
        const std::function<void()> happen = queue_.top().happen;
        queue_.pop();
        happen();
    }

    /// Gives the turn to the next rank, after the events before it.
    void pass_on() {
        running_ = -1;
        while (queue_.empty() || queue_.top().rank == event) {
            if (!queue_.empty()) happen();
            else if (blocked_ != 0 && on_deadlock) on_deadlock();
            else return;
        }
        running_ = queue_.top().rank;
        queue_.pop();
        ++turn_;
        at(running_).state = State::running;
        at(running_).turn.notify_one();
    }

    void take_turn(Lock& lock, int rank) {
        Rank& self = at(rank);
        self.turn.wait(lock, [&] { return self.state == State::running; });
    }

    std::mutex mutex_;
    std::vector<Rank> ranks_;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue_;  ///< the earliest first
    std::uint64_t sequence_ = 0;
    int blocked_ = 0, running_ = -1;
    std::uint64_t turn_ = 0;
};

/// One collective on the network. Times are virtual seconds.
struct CollectiveRecord {
    int communicator = 0;      ///< 0: the one of all ranks; others in the order of creation
    std::uint64_t number = 0;  ///< number within the communicator, from 0
    collective::Operation operation = collective::Operation::barrier;
    std::size_t bytes = 0;      ///< bytes of the whole buffer
    double first = 0;           ///< when the first rank started it
    double ready = 0;           ///< when the last rank started it
    double start = 0, end = 0;  ///< its times on the links
};

/// The links of a cluster. A collective takes the links of all its nodes, and a node's links carry one collective at a
/// time. A collective between nodes also needs the links within them.
class Network {
public:
    Network(const plan::Cluster& of, plan::Algorithm by)
        : cluster(of), algorithm(by), taken_(static_cast<std::size_t>(of.nodes())) {}

    const plan::Cluster cluster;
    const plan::Algorithm algorithm;

    /// A group of ranks as the network sees it.
    struct Route {
        std::vector<std::size_t> nodes;
        plan::Cluster shape;  ///< the cluster reduced to this group
    };

    /// A group with different numbers of ranks per node counts as one rank per node, on the slower link.
    Route route(std::span<const int> world_ranks) const {
        Route route{{}, cluster};
        std::vector<int> on_node(taken_.size());
        for (const int r : world_ranks) ++on_node[static_cast<std::size_t>(r / cluster.ranks_per_node)];
        int each = 0;
        bool even = true;
        for (std::size_t node = 0; node < on_node.size(); ++node) {
            if (on_node[node] == 0) continue;
            route.nodes.push_back(node);
            even = even && (each == 0 || each == on_node[node]);
            each = on_node[node];
        }
        route.shape.ranks = static_cast<int>(world_ranks.size());
        route.shape.ranks_per_node = even ? each : 1;
        if (!even) route.shape.between = plan::detail::slower(cluster.between, cluster.within);
        return route;
    }

    /// Reserves the links for a collective of this route: sets its `start` and `end`.
    void reserve(const Route& route, CollectiveRecord& collective) {
        collective.start = collective.ready;
        for (const std::size_t node : route.nodes) collective.start = detail::larger(collective.start, taken_[node]);
        const plan::CallCost cost = plan::collective_cost(kind_of(collective.operation), algorithm, route.shape);
        collective.end = collective.start + cost.seconds(static_cast<double>(collective.bytes));
        for (const std::size_t node : route.nodes) taken_[node] = collective.end;
    }

private:
    /// A reduction to one rank costs as much as a broadcast, a gather or scatter as much as an all-gather, and a
    /// barrier as much as an empty all-reduce.
    static plan::Collective kind_of(collective::Operation operation) noexcept {
        using enum plan::Collective;
        constexpr plan::Collective kinds[] = {all_reduce, broadcast,  reduce_scatter, all_gather,
                                              broadcast,  all_gather, all_gather,     all_reduce};
        return kinds[static_cast<std::size_t>(operation)];
    }

    std::vector<double> taken_;  ///< by node: the time until which its links are taken
};

/// The state that all ranks and communicators of a simulation share.
class Simulation : public collective::World {
public:
    Simulation(const plan::Cluster& cluster, plan::Algorithm algorithm, bool moves_buckets)
        : World(cluster.ranks, std::make_shared<State>()),
          scheduler(cluster.ranks),
          network(cluster, algorithm),
          moves_buckets_(moves_buckets) {
        scheduler.on_deadlock = [this] { end_the_earliest_wait(); };
    }

    Scheduler scheduler;
    Network network;
    std::vector<CollectiveRecord> records;
    int communicators = 0;  ///< number made so far
    List<int> nappers;      ///< world ranks blocked until any collective gets its place on the links

    /// Fails the simulation on all ranks. Only the first failure counts.
    void fail(const collective::Failure& failure) {
        World::fail(failure);
        scheduler.wake_all();
    }

    // --------------------------------------------------------------------------------------------------------- waiting

    /// The wait of a blocked rank: its deadline in virtual seconds, and the failure to report at a time-out.
    struct Wait {
        double deadline = Scheduler::endless;
        std::function<collective::Failure()> complain = {};
    };
    /// Blocks the rank until it is woken.
    void block(Scheduler::Lock& lock, int world_rank, Wait wait) {
        Wait& own = waits_[static_cast<std::size_t>(world_rank)];
        own = std::move(wait);
        scheduler.block(lock, world_rank);
        own = {};
    }
    /// Lets blocked ranks continue, no earlier than at `time` or at their deadlines; ranks that
    /// are not blocked are unchanged.
    void wake(List<int>& world_ranks, double time) {
        for (const int rank : world_ranks)
            scheduler.wake(rank, detail::smaller(time, waits_[static_cast<std::size_t>(rank)].deadline));
        world_ranks.clear();
    }

    /// Sets how long this rank may keep its turn in real time. No other rank runs meanwhile that could end it.
    void set_limit(int world_rank, std::chrono::nanoseconds limit) {
        limits_[static_cast<std::size_t>(world_rank)] = limit;
    }

    /// Run it in a separate thread, until `stop_watching`. It fails the simulation if a rank keeps its turn too long.
    void watch() {
        using Clock = std::chrono::steady_clock;
        Scheduler::Lock lock = scheduler.lock();
        std::uint64_t turn = scheduler.turn();
        Clock::time_point since = Clock::now();
        while (!stopped_.wait_for(lock, std::chrono::milliseconds(20), [&] { return stop_; })) {
            if (turn != scheduler.turn()) {
                turn = scheduler.turn();
                since = Clock::now();
            } else if (const int rank = scheduler.running();
                       rank >= 0 && !failed() && Clock::now() - since > limits_[static_cast<std::size_t>(rank)]) {
                fail({Errc::timeout, rank,
                      detail::text(
                          "rank ", rank, " has kept its turn for ",
                          detail::format_duration(limits_[static_cast<std::size_t>(rank)]),
                          "; ranks of a simulation run one at a time: find out what delays it, or raise the limit with "
                          "set_timeout()")});
            }
        }
    }
    void stop_watching() {
        const Scheduler::Lock lock = scheduler.lock();
        stop_ = true;
        stopped_.notify_all();
    }

    // ---------------------------------------------------------------------------------------------------------- memory

    /// Is this memory from `allocate`, in a simulation that moves no data of buckets?
    bool is_unmoved(const void* data) const { return !moves_buckets_ && regions.contains(data, 1); }
    message_passing::KnownMemory regions;  ///< from `allocate`

private:
    /// All ranks wait for one another: moves time to the earliest deadline, and reports that time-out.
    void end_the_earliest_wait() {
        std::size_t first = waits_.size();
        for (std::size_t r = 0; r < waits_.size(); ++r)
            if (scheduler.is_blocked(static_cast<int>(r)) &&
                (first == waits_.size() || waits_[r].deadline < waits_[first].deadline))
                first = r;
        if (waits_[first].deadline < Scheduler::endless)
            scheduler.advance_to(static_cast<int>(first), waits_[first].deadline);
        fail(waits_[first].complain());
    }

    bool moves_buckets_;
    /// By world rank.
    std::vector<Wait> waits_ = std::vector<Wait>(static_cast<std::size_t>(network.cluster.ranks));
    std::vector<std::chrono::nanoseconds> limits_ = std::vector<std::chrono::nanoseconds>(waits_.size());
    std::condition_variable stopped_;
    bool stop_ = false;
};

}  // namespace gradsync::inline v0_2::simulation
