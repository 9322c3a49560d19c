// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "engine_collectives.hpp"
#include "messages/transport.hpp"
#include "placement.hpp"

namespace gradsync::inline v0_2 {

namespace message_passing {
class MessageWorld;
}

/// Options of the backends whose ranks are processes. All except `domain`, `timeout` and
/// `bind` must be equal on all ranks.
struct ProcessOptions {
    /// The time limit of construction, once all ranks have begun it, and of every later wait; must be positive. Data
    /// that moves between its machine and others restarts the limit. One wait takes at most 16 limits. `set_timeout`
    /// changes it. docs/guides/processes.md says how much later the error may come.
    std::chrono::nanoseconds timeout = std::chrono::minutes(5);
    bool shared_memory = true;  ///< ranks of one machine share memory if they can; otherwise they send messages
    int domain = -1;  ///< if not -1, only ranks of one machine with the same number share memory. Divides a machine.
    /// The address or network interface ("eth0") at which this rank listens. Ranks that share no memory with it connect
    /// there. Empty: all networks.
    std::string bind = {};
};

namespace detail {

/// How ranks that are processes reach one another.
struct Paths {
    Machines machines = Machines();
    bool share = false;                 ///< whether ranks of one machine can share memory
    std::string problem = {};           ///< why ranks do not share memory
    std::string unwatched = {};         ///< says which deaths would go unnoticed: ", but ...", or empty
    std::string messages = "messages";  ///< kind of messages between ranks that share no memory
    bool any_thread = true;             ///< whether any thread may send messages, at any time

    Paths of(const collective::Group& group) const {
        Paths part = *this;
        part.machines = machines.of(group);
        return part;
    }

    /// "4 processes on 2 machines that ..."
    std::string describe() const;
};

/// The engine of a communicator, and how its ranks reach one another.
struct Connection {
    Shared<collective::Engine> engine;
    Paths paths;
};

/// Sets up shared memory on each machine. If that fails on any machine, or is not wanted,
/// `engine` is null on every rank, and `paths.problem` says why. If `engine` is null or there are several machines,
/// call `add_messages` next. Collective.
Connection share_memory(bootstrap::AnyRendezvous meeting, const Placement& ranks, const ProcessOptions& options);

/// Connects ranks that cannot see one another's processes, so that the network reports a death. Returns the text of
/// `Paths::unwatched`.
std::string watch_processes(message_passing::MessageWorld& world, bootstrap::AnyRendezvous meeting,
                            const Placement& ranks, const ProcessOptions& options);

/// Adds messages between ranks that share no memory. `watch`: `watch_processes`, or null if the transport itself
/// detects deaths. Collective.
void add_messages(Connection& connection, bootstrap::AnyRendezvous meeting, const Placement& ranks,
                  const ProcessOptions& options, std::unique_ptr<message_passing::Transport> transport,
                  decltype(&watch_processes) watch);

/// Connects ranks that are processes in the fastest way: shared memory on one machine, messages between machines.
/// `transport()` makes the transport of the messages, if there are any; either all ranks call
/// it or none does. Collective.
template <class MakeTransport>
Connection connect(bootstrap::AnyRendezvous meeting, const Placement& ranks, const ProcessOptions& options,
                   decltype(&watch_processes) watch, MakeTransport&& transport) {
    Connection connection = share_memory(meeting, ranks, options);
    if (!connection.engine || ranks.machines.count() > 1)
        add_messages(connection, meeting, ranks, options, transport(), watch);
    // From here on a rank that ends does not fail the others' construction.
    bootstrap::exchange(meeting, std::uint8_t{0});
    return connection;
}

/// Returns a hash of the layout of the bytes that ranks send to one another, which must be equal on all ranks. Raise
/// the first number when the meaning of these bytes changes.
constexpr std::uint64_t build() noexcept {
    std::uint64_t hash = 2;
    for (const std::size_t part :
         {sizeof(collective::Call), offsetof(collective::Call, root), sizeof(collective::World::State),
          sizeof(collective::ProcessIdentity), static_cast<std::size_t>(collective::Operation::reduce_step),
          static_cast<std::size_t>(ReduceOp::mean), static_cast<std::size_t>(DType::f8e5m2), sizeof(void*)})
        hash = (hash ^ part) * 1099511628211u;
    return hash;
}

/// Compares the options of all ranks; `own` is the part that only this backend has. A rank with a `problem`, or without
/// a valid time limit, takes part, so that the others learn of it, and then throws Error(invalid_argument). Throws
/// Error(parameter_mismatch) on every rank if one of them runs another build of this library, or if their `options`
/// differ. Collective.
[[gnu::cold]] inline void compare_options(bootstrap::AnyRendezvous meeting, const ProcessOptions& options,
                                          const char* backend, const char* name, int own = 0,
                                          const char* problem = nullptr) {
    struct Opening {
        std::uint64_t build, options;
    };
    const int common = collective::is_limit(options.timeout) * 2 + options.shared_memory;
    const List<Opening> all =
        bootstrap::exchange(meeting, Opening{build(), static_cast<std::uint64_t>(own * 4 + common)});
    const auto refuse = [&](const char* operation, std::size_t r, const auto&... what) {
        raise(Errc::parameter_mismatch, {.operation = operation, .rank = meeting.rank(), .peer = static_cast<int>(r)},
              what...);
    };
    for (std::size_t r = 0; r < all.size(); ++r)
        if (all[r].build != all[0].build)
            refuse("rendezvous", r, "rank ", r,
                   " runs another build of gradsync than rank 0; start all ranks from one version of it");
    collective::check_limit(options.timeout);
    if (problem != nullptr) raise(Errc::invalid_argument, problem);
    for (std::size_t r = 0; r < all.size(); ++r)
        if (all[r].options != all[0].options)
            refuse(backend, r, backend, ": rank ", r, " has other ", name, " than rank 0; give all ranks the same");
}

/// The common part of backends whose ranks are processes: ranks share memory on one machine and send messages between
/// machines. Derived must be constructible from a Connection by this class (a friend).
template <class Derived>
class ProcessBackend : public EngineCollectives<Derived, collective::Engine> {
public:
    static constexpr BackendAbilities abilities{.progress_thread = true,
                                                .poll = true,
                                                .failed = true,
                                                .tags = true,
                                                .cheaper_alone = true,
                                                .steps_inside = true};

    /// Between machines, messages move only inside calls. A progress thread makes such calls,
    /// if any thread may send messages.
    bool wants_progress_thread() const { return paths_->any_thread && paths_->machines.count() > 1; }

    /// In bytes; see the concept. Memory that is not shared travels in pieces that fit the caches, which is cheaper
    /// than two copies that do not. Messages are sent from any memory.
    std::size_t cheaper_alone_from(bool shared) const {
        return std::size_t{1} << (shared && paths_->machines.count() == 1 ? 18 : 20);
    }
    bool shares(const BufferView& view) const noexcept { return this->engine_->shares(view.data, view.bytes()); }

    bool steps_inside() const noexcept { return this->engine_->steps_inside(); }

    /// Says how the ranks reach one another, and why no faster way is in use.
    std::string describe() const { return paths_->describe() + this->engine_->remark(); }

    /// Returns memory in which collectives are fastest; see the concept. Throws Error, on all ranks, if their sizes
    /// differ. Collective.
    collective::Memory allocate(std::size_t bytes) {
        this->check_handle();
        this->engine_->check_size("allocate", bytes);
        return this->engine_->allocate(bytes);
    }

    /// See `gradsync::adopt`. Collective.
    collective::Memory adopt(std::span<std::byte> region) {
        this->check_handle();
        return this->engine_->adopt(region);
    }

protected:
    explicit ProcessBackend(Connection connection)
        : EngineCollectives<Derived, collective::Engine>(std::move(connection.engine)),
          paths_(Shared<const Paths>::make(std::move(connection.paths))) {
        if (debugs()) this->announce(describe());
    }

    Shared<const Paths> paths_;

private:
    friend class EngineCollectives<Derived, collective::Engine>;

    Derived join(const collective::Group& group) { return Derived({this->engine_->split(group), paths_->of(group)}); }
};

}  // namespace detail

}  // namespace gradsync::inline v0_2

#ifdef GRADSYNC_ONCE
#include "hierarchical_engine.hpp"

namespace gradsync::inline v0_2::detail {

GRADSYNC_ONCE std::string Paths::describe() const {
    const int count = machines.count();
    const std::string ranks = text(machines.size(), machines.size() == 1 ? " process" : " processes",
                                   count > 1 ? text(" on ", count, " machines") : std::string());
    if (machines.size() == 1) return ranks;
    if (share && count == 1) return ranks + " that share memory";
    const int teams = share ? machines.teams().count() : 0;
    if (share && teams < machines.size())
        return text(ranks, " that share memory ", teams == count ? "on each machine" : text("in ", teams, " teams"),
                    ", and send ", messages, " between them", unwatched);
    const char* const alone =
        count == machines.size()
            ? "one on each machine"
            : "ranks of a machine cannot reduce first; number ranks machine by machine, a power of two on each";
    return text(ranks, " that send ", messages, " (", share ? alone : problem, ")", unwatched);
}

GRADSYNC_ONCE Connection share_memory(bootstrap::AnyRendezvous meeting, const Placement& ranks,
                                      const ProcessOptions& options) {
    using namespace shared_memory;
    Connection connection{{}, {.machines = ranks.machines}};
    std::string& problem = connection.paths.problem;
    const bool several = ranks.machines.count() > 1;
    if (several && ranks.machines.count() == ranks.size) problem = "one on each machine";
    else if (!options.shared_memory) problem = "shared memory is switched off";
    if (!problem.empty()) return connection;

    const std::size_t room = ProcessEngine::bytes(ranks.neighbours.size());
    SharedSegment shared =
        SharedSegment::share([&](const auto& own) { return bootstrap::exchange(meeting, own); }, ranks.rank,
                             ranks.neighbours.front(), [&] { return ProcessWorld::create(ranks.size, room); });
    if (shared.without >= 0) {
        problem = text(
            "they cannot share memory: ", shared.problem.empty() ? text("see rank ", shared.without) : shared.problem,
            "; run them as one user in one container, with /proc mounted");
        return connection;
    }
    const auto world = Shared<ProcessWorld>::make(shared.segment, ranks.rank, ranks.size, ranks.size_here());
    connection.engine =
        Shared<ProcessEngine>::make(world, Shared<Regions>::make(), ranks.neighbours,
                                    ranks.machines.local_rank(ranks.rank), world->memory(), 0u, options.timeout);
    connection.paths.share = true;
    return connection;
}

GRADSYNC_ONCE std::string watch_processes(message_passing::MessageWorld& world, bootstrap::AnyRendezvous meeting,
                                          const Placement& ranks, const ProcessOptions& options) {
    const std::uint64_t own = ranks.processes[ranks.rank].system;
    const auto apart = [&](int r) { return own == 0 || ranks.processes[r].system != own; };
    bool any = false;
    for (int r = 0; r < ranks.size; ++r) any |= r != ranks.rank && apart(r);
    message_passing::Lifeline& lifeline = world.lifeline();
    const auto addresses = bootstrap::exchange(meeting, any ? lifeline.listen(meeting, options.bind) : net::Contact());
    if (!any) return {};
    const std::size_t wanted =
                          lifeline.connect(ranks.rank, addresses, meeting.secret(), std::chrono::seconds(2), apart),
                      got = lifeline.lines();
    if (got == wanted) return {};
    return text(", but ", wanted - got, " of ", wanted,
                " connections that watch for dead processes could not be made: only the time limit reveals a death");
}

GRADSYNC_ONCE void add_messages(Connection& connection, bootstrap::AnyRendezvous meeting, const Placement& ranks,
                                const ProcessOptions& options, std::unique_ptr<message_passing::Transport> transport,
                                decltype(&watch_processes) watch) {
    using namespace message_passing;
    auto local = connection.engine.as<shared_memory::ProcessEngine>();
    auto world =
        MessageWorld::make(std::move(transport), ranks.processes, ranks.size_here(), local ? &local->world() : nullptr);
    if (watch != nullptr) connection.paths.unwatched = watch(*world, meeting, ranks, options);
    auto messages =
        Shared<MessageEngine>::make(std::move(world), collective::Group::of_all(ranks.size, ranks.rank).members,
                                    ranks.rank, 0, Shared<KnownMemory>::make(), options.timeout);
    if (local) connection.engine = HierarchicalEngine::combine(std::move(messages), std::move(local), ranks.machines);
    else connection.engine = std::move(messages);
}

}  // namespace gradsync::inline v0_2::detail
#endif
