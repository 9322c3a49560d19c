// SPDX-License-Identifier: BSL-1.0
#pragma once

/// The definitions of connect.hpp, with the engines that they choose from. connect.hpp includes it, unless gradsync::compiled holds it.

#include "connect.hpp"
#include "hierarchical_engine.hpp"

namespace gradsync::inline v0_2::detail {

GRADSYNC_ONCE std::string Paths::describe() const {
    const int count = machines.count();
    const std::string ranks = text(machines.size(), machines.size() == 1 ? " process" : " processes",
                                   count > 1 ? text(" on ", count, " machines") : std::string());
    if (share && count == 1) return ranks + " that share memory";
    const int teams = share ? machines.teams().count() : 0;
    if (share && teams < machines.size())
        return text(ranks, " that share memory ", teams == count ? "on each machine" : text("in ", teams, " teams"), ", and send ",
                    messages, " between them", unwatched);
    const char* const alone = count == machines.size()
                                  ? "one on each machine"
                                  : "no ranks of a machine can add up first; number them machine by machine, a power of two on each";
    return text(ranks, " that send ", messages, " (", share ? alone : problem, ")", unwatched);
}

GRADSYNC_ONCE Connection share_memory(bootstrap::AnyRendezvous meeting, const Placement& ranks, const ProcessOptions& options) {
    using namespace shared_memory;
    Connection connection{{}, {.machines = ranks.machines}};
    std::string& problem = connection.paths.problem;
    const bool several = ranks.machines.count() > 1;
    if (several && ranks.machines.count() == ranks.size) problem = "one on each machine";
    else if (!options.shared_memory) problem = "shared memory is switched off";
    if (!problem.empty()) return connection;

    const std::size_t room = ProcessEngine::bytes(ranks.neighbours.size());
    SharedSegment shared = SharedSegment::share([&](const auto& own) { return bootstrap::exchange(meeting, own); }, ranks.rank,
                                                ranks.neighbours.front(), [&] { return ProcessWorld::create(ranks.size, room); });
    if (shared.without >= 0) {
        problem = text("they cannot share memory: ", shared.problem.empty() ? text("see rank ", shared.without) : shared.problem,
                       "; run them as one user in one container, with /proc mounted");
        return connection;
    }
    const auto world = Shared<ProcessWorld>::make(shared.segment, ranks.rank, ranks.size, ranks.size_here());
    connection.engine = Shared<ProcessEngine>::make(world, Shared<Regions>::make(), ranks.neighbours, ranks.machines.local_rank(ranks.rank),
                                                    world->memory(), 0u, options.timeout);
    connection.paths.share = true;
    return connection;
}

GRADSYNC_ONCE std::string watch_processes(message_passing::MessageWorld& world, bootstrap::AnyRendezvous meeting, const Placement& ranks,
                                          const ProcessOptions& options) {
    const std::uint64_t own = ranks.processes[static_cast<std::size_t>(ranks.rank)].system;
    const auto apart = [&](int r) { return own == 0 || ranks.processes[static_cast<std::size_t>(r)].system != own; };
    bool any = false;
    for (int r = 0; r < ranks.size; ++r) any |= r != ranks.rank && apart(r);
    message_passing::Lifeline& lifeline = world.lifeline();
    const auto addresses = bootstrap::exchange(meeting, any ? lifeline.listen(meeting, options.bind) : net::Contact());
    if (!any) return {};
    const std::size_t wanted = lifeline.connect(ranks.rank, addresses, meeting.secret(), std::chrono::seconds(2), apart),
                      got = lifeline.lines();
    if (got == wanted) return {};
    return text(", but ", wanted - got, " of ", wanted,
                " connections that tell of a process's death could not be made: it would show by the time limit only");
}

GRADSYNC_ONCE void add_messages(Connection& connection, bootstrap::AnyRendezvous meeting, const Placement& ranks,
                                const ProcessOptions& options, Owner<message_passing::Transport> transport,
                                decltype(&watch_processes) watch) {
    using namespace message_passing;
    auto local = connection.engine.as<shared_memory::ProcessEngine>();
    auto world = MessageWorld::make(std::move(transport), ranks.processes, ranks.size_here(), local ? &local->world() : nullptr);
    if (watch != nullptr) connection.paths.unwatched = watch(*world, meeting, ranks, options);
    auto messages = Shared<MessageEngine>::make(std::move(world), collective::Group::of_all(ranks.size, ranks.rank).members, ranks.rank, 0,
                                                Shared<KnownMemory>::make(), options.timeout);
    if (local) connection.engine = HierarchicalEngine::combine(std::move(messages), std::move(local), ranks.machines);
    else connection.engine = std::move(messages);
}

}  // namespace gradsync::inline v0_2::detail
