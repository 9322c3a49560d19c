// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../bootstrap/rendezvous.hpp"
#include "../core/backend_abilities.hpp"
#include "../core/clock.hpp"
#include "../core/error.hpp"
#include "../core/list.hpp"
#include "engine.hpp"
#include "engine_collectives.hpp"
#include "hierarchical_engine.hpp"
#include "messages/message_engine.hpp"
#include "placement.hpp"
#include "shared_memory/process_engine.hpp"

namespace gradsync::inline v0_2 {

/// Options of the backends whose ranks are processes; the same on all ranks (except `domain` and `timeout`).
struct ProcessOptions {
    /// The time limit of every wait, construction included; must be positive. `set_timeout` changes it.
    std::chrono::nanoseconds timeout = std::chrono::minutes(5);
    bool shared_memory = true;  ///< ranks of one machine share memory if they can; otherwise they send messages like all others
    int domain = -1;            ///< if not -1, only ranks of one machine with the same number share memory, so that a machine can be
                                ///< divided
};

namespace detail {

/// How ranks that are processes reach one another.
struct Paths {
    Machines machines = Machines();
    Machines teams = Machines();
    bool share = false;                 ///< whether the ranks of a team can share memory
    std::string problem = {};           ///< why memory is not shared
    std::string unwatched = {};         ///< text about ranks whose death would not be noticed: ", but ...", or empty
    std::string messages = "messages";  ///< kind of messages that they send if they do not share memory
    bool any_thread = true;             ///< whether any thread may send messages, at any time

    Paths of(const collective::Group& group) const {
        Paths part = *this;
        part.machines = machines.of(group);
        part.teams = teams.teams_of(group);
        return part;
    }

    /// "4 processes on 2 machines that ..."
    std::string describe() const {
        const int count = machines.count();
        const std::string ranks = text(machines.size(), machines.size() == 1 ? " process" : " processes",
                                       count > 1 ? text(" on ", count, " machines") : std::string());
        if (share && teams.count() == 1) return ranks + " that share memory";
        if (share && teams.count() < machines.size())
            return text(ranks, " that share memory ", teams.count() == count ? "on each machine" : text("in ", teams.count(), " teams"),
                        ", and send ", messages, " between them", unwatched);
        return text(ranks, " that send ", messages, " (", share ? "one in each team" : problem, ")", unwatched);
    }
};

/// The engine of a communicator, and how its ranks reach one another.
struct Connection {
    std::shared_ptr<collective::Engine> engine;
    Paths paths;
};

/// Sets up shared memory on each machine. If that fails on any machine, returns nothing on every rank, and sets `problem`. Collective over
/// all ranks.
template <Rendezvous R>
std::shared_ptr<shared_memory::ProcessEngine> share_memory(R& meeting, const Placement& ranks, std::chrono::nanoseconds timeout,
                                                           std::string& problem) {
    using namespace shared_memory;
    const std::size_t room = ProcessEngine::bytes(ranks.team.size());
    SharedSegment shared = SharedSegment::share([&](const auto& own) { return bootstrap::exchange(meeting, own); }, ranks.rank,
                                                ranks.team.front(), [&] { return ProcessWorld::create(ranks.size, room); });
    if (shared.without >= 0) {
        problem = text("they cannot share memory: ", shared.problem.empty() ? text("see rank ", shared.without) : shared.problem,
                       "; run them as one user in one container, with /proc mounted");
        return {};
    }
    const auto world = std::make_shared<ProcessWorld>(shared.segment, ranks.rank, ranks.size, ranks.size_here);
    return std::make_shared<ProcessEngine>(world, std::make_shared<Regions>(), ranks.team, ranks.teams.local_rank(ranks.rank),
                                           world->memory(), 0, timeout);
}

/// Connects ranks that are processes in the best way: memory that they share on one machine, messages between several. `transport()` makes
/// the transport of the messages, if there are any. `watch(world)` sets up the detection of dead ranks and returns `Paths::unwatched`.
/// Either all ranks call both or none does. Collective.
template <Rendezvous R, class MakeTransport, class Watch>
Connection connect(R& meeting, const Placement& ranks, const ProcessOptions& options, MakeTransport&& transport, Watch&& watch) {
    using namespace message_passing;
    std::string problem;
    const bool several = ranks.machines.count() > 1;
    if (several && ranks.machines.count() == ranks.size) problem = "one on each machine";
    else if (!options.shared_memory) problem = "shared memory is switched off";
    else if (several && ranks.teams.most() == 1)
        problem = "no ranks of a machine can add up first; number them machine by machine, a power of two on each";

    std::shared_ptr<shared_memory::ProcessEngine> local;
    if (problem.empty()) local = share_memory(meeting, ranks, options.timeout, problem);
    Connection connection{local, {.machines = ranks.machines, .teams = ranks.teams, .share = local != nullptr, .problem = problem}};
    if (several || !local) {
        auto world = MessageWorld::make(transport(), ranks.processes, ranks.size_here, local ? &local->world() : nullptr);
        connection.paths.unwatched = watch(*world);
        auto messages =
            std::make_shared<MessageEngine>(std::move(world), ranks.all(), ranks.rank, 0, std::make_shared<KnownMemory>(), options.timeout);
        if (local) connection.engine = HierarchicalEngine::combine(std::move(messages), std::move(local), ranks.teams);
        else connection.engine = std::move(messages);
    }
    bootstrap::exchange(meeting, std::uint8_t{0});  // a rank that ends from now on ends no other rank's construction
    return connection;
}

/// Returns the options of all ranks, by rank, one byte each; `own` is the part that only this backend has. A rank without a valid time
/// limit takes part, so that the others learn of it, and then throws. Collective.
template <Rendezvous R>
std::vector<std::uint8_t> exchange_options(R& meeting, const ProcessOptions& options, int own = 0) {
    const int common = collective::is_limit(options.timeout) * 2 + options.shared_memory;
    auto all = bootstrap::exchange(meeting, static_cast<std::uint8_t>(own * 4 + common));
    collective::check_limit(options.timeout);
    return all;
}

/// Throws Error(parameter_mismatch) if the options of the ranks differ. `all`: by rank, the same on all ranks.
inline void check_same_options(const std::vector<std::uint8_t>& all, int rank, const char* backend, const char* options) {
    for (std::size_t r = 0; r < all.size(); ++r)
        if (all[r] != all[0])
            raise(Errc::parameter_mismatch, text(backend, ": rank ", r, " has other ", options, " than rank 0; give all ranks the same"),
                  {.operation = backend, .rank = rank, .peer = static_cast<int>(r)});
}

/// The common part of backends whose ranks are processes: ranks share memory on one machine and send messages between several. Derived must
/// be constructible from a Connection by this class (a friend).
template <class Derived>
class ProcessBackend : public EngineCollectives<Derived, collective::Engine> {
public:
    static constexpr BackendAbilities abilities{.progress_thread = true, .poll = true, .failed = true, .tags = true};

    /// Between machines, messages move only inside calls. A progress thread makes these calls, if any thread may send messages.
    bool wants_progress_thread() const { return paths_.any_thread && paths_.teams.count() > 1; }

    /// Says how the ranks reach one another, and why not by the faster way.
    std::string describe() const { return paths_.describe() + this->engine_->remark(); }

    /// Returns memory in which collectives are fastest; see the concept. Collective.
    collective::Memory allocate(std::size_t bytes) { return this->engine_->allocate(bytes); }

protected:
    explicit ProcessBackend(Connection connection) noexcept
        : EngineCollectives<Derived, collective::Engine>(std::move(connection.engine)), paths_(std::move(connection.paths)) {}

    Paths paths_;

private:
    friend EngineCollectives<Derived, collective::Engine>;

    Derived join(const collective::Group& group) { return Derived({this->engine_->split(group), paths_.of(group)}); }
};

}  // namespace detail

}  // namespace gradsync::inline v0_2
