// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <map>
#include <memory>

#include "../collective/failures.hpp"
#include "../plan/cost_model.hpp"
#include "scheduler.hpp"

namespace gradsync::inline v0_2::simulation {

/// One collective, as the network saw it. Times are virtual seconds.
struct CollectiveRecord {
    int communicator = 0;      ///< 0: the one of all ranks; others in the order in which they were made
    std::uint64_t number = 0;  ///< number within the communicator, from 0
    collective::Operation operation = collective::Operation::barrier;
    std::size_t bytes = 0;      ///< of the whole buffer
    double first = 0;           ///< when the first rank started it
    double ready = 0;           ///< when the last rank started it
    double start = 0, end = 0;  ///< its times on the links
};

/// The links of a cluster. A collective takes the links of all its nodes, and a node's links carry one collective at a time: one between
/// nodes needs the links within them, too.
class Network {
public:
    Network(const plan::Cluster& of, plan::Algorithm by) : cluster(of), algorithm(by), taken_(static_cast<std::size_t>(of.nodes())) {}

    const plan::Cluster cluster;
    const plan::Algorithm algorithm;

    /// The network's view of a group of ranks.
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
        for (const std::size_t node : route.nodes) collective.start = gradsync::detail::larger(collective.start, taken_[node]);
        const plan::CallCost cost = plan::collective_cost(kind_of(collective.operation), algorithm, route.shape);
        collective.end = collective.start + cost.seconds(static_cast<double>(collective.bytes));
        for (const std::size_t node : route.nodes) taken_[node] = collective.end;
    }

private:
    /// A reduction to one rank costs as much as a broadcast; a gather or scatter as much as an all-gather; a barrier as much as an empty
    /// all-reduce.
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
    List<int> nappers;      ///< world ranks that are blocked until any collective has got its place on the links

    /// Fails the simulation on all ranks. Only the first failure counts.
    void fail(const collective::Failure& failure) {
        World::fail(failure);
        scheduler.wake_all();
    }

    // ------------------------------------------------------------------------------------------------------- waiting

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
    /// Lets blocked ranks go on, no earlier than at `time` or at their deadlines; ranks that are not blocked stay as they are.
    void wake(List<int>& world_ranks, double time) {
        for (const int rank : world_ranks)
            scheduler.wake(rank, gradsync::detail::smaller(time, waits_[static_cast<std::size_t>(rank)].deadline));
        world_ranks.clear();
    }

    /// Sets how long this rank may keep its turn in real time: no other rank runs meanwhile that could end it.
    void set_limit(int world_rank, std::chrono::nanoseconds limit) { limits_[static_cast<std::size_t>(world_rank)] = limit; }

    /// Run it in a thread of its own, until `stop_watching`. It fails the simulation if a rank keeps its turn too long.
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
                      detail::text("rank ", rank, " has not let others have their turn for ",
                                   detail::format_duration(limits_[static_cast<std::size_t>(rank)]),
                                   "; ranks of a simulation run one at a time: find out what keeps it, or raise the limit with "
                                   "set_timeout()")});
            }
        }
    }
    void stop_watching() {
        const Scheduler::Lock lock = scheduler.lock();
        stop_ = true;
        stopped_.notify_all();
    }

    // -------------------------------------------------------------------------------------------------------- memory

    /// Is this memory from `allocate` whose contents are not moved?
    bool is_unmoved(const void* data) const {
        if (moves_buckets_ || data == nullptr) return false;
        auto region = regions_.upper_bound(static_cast<const std::byte*>(data));
        return region != regions_.begin() && static_cast<const std::byte*>(data) < (--region)->second;
    }
    void add_region(const void* data, std::size_t bytes) {
        regions_[static_cast<const std::byte*>(data)] = static_cast<const std::byte*>(data) + bytes;
    }
    void remove_region(const void* data) { regions_.erase(static_cast<const std::byte*>(data)); }

private:
    /// All ranks wait for one another: moves time to the earliest deadline, and reports that time-out.
    void end_the_earliest_wait() {
        std::size_t first = waits_.size();
        for (std::size_t r = 0; r < waits_.size(); ++r)
            if (scheduler.is_blocked(static_cast<int>(r)) && (first == waits_.size() || waits_[r].deadline < waits_[first].deadline))
                first = r;
        if (waits_[first].deadline < Scheduler::endless) scheduler.advance_to(static_cast<int>(first), waits_[first].deadline);
        fail(waits_[first].complain());
    }

    bool moves_buckets_;
    /// By world rank.
    std::vector<Wait> waits_ = std::vector<Wait>(static_cast<std::size_t>(network.cluster.ranks));
    std::vector<std::chrono::nanoseconds> limits_ = std::vector<std::chrono::nanoseconds>(waits_.size());
    std::condition_variable stopped_;
    bool stop_ = false;
    std::map<const std::byte*, const std::byte*> regions_;
};

}  // namespace gradsync::inline v0_2::simulation
