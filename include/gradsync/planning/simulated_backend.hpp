// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../backend/run_ranks.hpp"
#include "../collective/engine_collectives.hpp"
#include "../core/backend.hpp"
#include "simulation_engine.hpp"

namespace gradsync::inline v0_2 {

/// A rank that computes slower than the others (or faster): its compute takes `factor` times as long.
struct Straggler {
    int rank = 0;       ///< the rank
    double factor = 1;  ///< of its compute times
};

/// The cluster that is simulated.
struct SimulatedCluster {
    plan::Cluster cluster = {};                         ///< number of ranks, their nodes and links
    plan::Algorithm algorithm = plan::Algorithm::ring;  ///< of all collectives
    std::vector<Straggler> stragglers = {};             ///< ranks that are slower or faster
    double jitter = 0;       ///< every compute takes up to this fraction longer, at random: 0.1 is 10 %
    std::uint64_t seed = 1;  ///< seed of the jitter
    /// Whether collectives move data in memory from `allocate`, such as buckets. If not, all times stay the same, but
    /// the gradients of thousands of ranks cost neither memory nor work.
    bool moves_buckets = true;
    /// Limit of every wait: in virtual time, and in real time if one rank keeps all others from going on. (A rank that
    /// tests repeatedly sleeps until something happens.)
    std::chrono::nanoseconds timeout = std::chrono::minutes(5);
};

/// Simulates ranks in virtual time. Collectives are real, but take the time of a cost model;
/// compute takes the time that you give. You can observe real Reducers and policies on thousands of ranks,
/// on one core, and every run is the same.
///
/// - A collective begins when its last rank has started it and its links are free, one collective at a time: see
///   simulation::Network. `plan::collective_cost` gives its duration.
/// - Ranks have a thread each, but only one runs at a time: they may share captured variables without locks.
/// - Sums have the bits of ThreadBackend's. `now()` is the rank's clock, in seconds;
///   only `compute()` and waiting advance it.
/// - `run_simulated` starts the ranks and returns the network's records.
class SimulatedBackend : public detail::EngineCollectives<SimulatedBackend, simulation::Engine> {
public:
    static constexpr BackendAbilities abilities{.poll = true, .failed = true, .tags = true, .clock = true};

    /// "4096 simulated ranks of a cluster of 512 nodes (hierarchical)"
    std::string describe() const {
        const simulation::Network& network = engine_->world().network;
        return detail::text(size(), " simulated ranks of a cluster of ", network.cluster.nodes(), " nodes (",
                            network.algorithm, ")");
    }

    /// Memory that takes no space until it is written; see the concept.
    collective::Memory allocate(std::size_t bytes) { return engine_->allocate(bytes); }

    /// This rank's clock, in seconds since the simulation began.
    double now() const { return engine_->now(); }

    /// Advances this rank's clock by `seconds`, times the factors of the cluster's stragglers and jitter. Throws
    /// Error(invalid_argument) if `seconds` is negative or not finite.
    void compute(double seconds) {
        plan::detail::check_amount("compute", "seconds", seconds, engine_->own_world_rank());
        engine_->pass(seconds * pace_->next());
    }

private:
    friend EngineCollectives;
    template <class F>
    friend auto run_simulated(const SimulatedCluster& options, F&& f);

    /// The factor by which a rank's computes are longer than given.
    struct Pace {
        double factor, jitter;
        std::uint64_t state;

        double next() noexcept {
            return jitter == 0 ? factor
                               : factor * (1 + jitter * static_cast<double>(detail::split_mix(state) >> 11) * 0x1p-53);
        }
    };

    SimulatedBackend(std::shared_ptr<simulation::Engine> engine, std::shared_ptr<Pace> pace)
        : EngineCollectives(std::move(engine)), pace_(std::move(pace)) {}

    SimulatedBackend join(const collective::Group& group) const {
        return SimulatedBackend(engine_->split(group), pace_);
    }

    std::shared_ptr<Pace> pace_;
};

static_assert(Backend<SimulatedBackend>);

/// The result of a simulation.
struct SimulatedRun {
    std::vector<double> rank_seconds;                       ///< each rank's clock when its function returned
    std::vector<simulation::CollectiveRecord> collectives;  ///< in the order in which they took their links

    /// Returns the time at which the last rank returned.
    double seconds() const noexcept {
        double last = 0;
        for (const double s : rank_seconds) last = detail::larger(last, s);
        return last;
    }
};

/// Runs `f(SimulatedBackend)` for every rank of the cluster and returns when all have returned. Ranks take turns, so
/// `f` may write to captured variables. Exceptions: as with `run_threads`. Throws Error(invalid_argument) if the
/// options are invalid.
template <class F>
auto run_simulated(const SimulatedCluster& options, F&& f) {
    plan::check(options.cluster);
    constexpr const char* name = "run_simulated";
    std::vector<double> factors(static_cast<std::size_t>(options.cluster.ranks), 1.0);
    for (const Straggler& s : options.stragglers) {
        if (s.rank < 0 || s.rank >= options.cluster.ranks)
            detail::refuse(name, "straggler ", s.rank, " is out of range; there are ", options.cluster.ranks, " ranks");
        plan::detail::check_amount(name, "a straggler's factor", s.factor);
        factors[static_cast<std::size_t>(s.rank)] = s.factor;
    }
    plan::detail::check_amount(name, "jitter", options.jitter);
    if (options.timeout <= std::chrono::nanoseconds::zero()) detail::refuse(name, "the time limit must be positive");

    const auto world =
        std::make_shared<simulation::Simulation>(options.cluster, options.algorithm, options.moves_buckets);
    const List<int> ranks = collective::Group::of_all(options.cluster.ranks, 0).members;
    std::vector<SimulatedBackend> handles;
    {
        const auto communicator = std::make_shared<simulation::Communicator>(world, ranks);
        for (const int r : ranks) {
            const double factor = factors[static_cast<std::size_t>(r)];
            world->set_limit(r, options.timeout);
            const SimulatedBackend::Pace pace{factor, options.jitter,
                                              options.seed * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(r)};
            handles.push_back(SimulatedBackend(std::make_shared<simulation::Engine>(communicator, r, options.timeout),
                                               std::make_shared<SimulatedBackend::Pace>(pace)));
        }
    }
    const auto take_turns = [&](std::size_t r, auto&& run) {
        const int rank = static_cast<int>(r);
        {
            auto lock = world->scheduler.lock();
            world->scheduler.enter(lock, rank);
        }
        run();
        const auto lock = world->scheduler.lock();
        world->scheduler.leave(rank);
    };
    auto watch = [&] { world->watch(); };
    detail::Thread watchman;
    watchman.start(watch);
    struct Relief {  // destroyed before the watchman, which joins its thread
        simulation::Simulation& world;
        ~Relief() { world.stop_watching(); }
    } const relief{*world};
    detail::run_ranks(
        std::move(handles), [&](SimulatedBackend backend) { f(std::move(backend)); }, take_turns);

    SimulatedRun result{{}, std::move(world->records)};
    for (const int r : ranks) result.rank_seconds.push_back(world->scheduler.now(r));
    return result;
}

}  // namespace gradsync::inline v0_2
