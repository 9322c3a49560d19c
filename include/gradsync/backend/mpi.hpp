#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "../collective/engine.hpp"
#include "../collective/process.hpp"
#include "../core/backend.hpp"
#include "../core/clock.hpp"
#include "../core/error.hpp"
#include "../message_passing/message_engine.hpp"
#include "../shared_memory/process_engine.hpp"
#include "hierarchical_engine.hpp"
#include "engine_collectives.hpp"
#include "mpi_transport.hpp"

namespace gradsync::inline v0 {

/// Options of `MpiBackend`, the same on all ranks (but for `domain` and `timeout`).
struct MpiOptions {
    std::chrono::nanoseconds timeout = std::chrono::minutes(5);  ///< of every wait; `set_timeout` changes it
    bool shared_memory = true;  ///< ranks of one machine share memory; else they send messages like all others
    int domain = -1;            ///< if not -1, only ranks of one machine with the same number here share memory: a part of it
    bool reproducible = false;  ///< the bits of ThreadBackend, also where several ranks run on each of several machines
};

/// Ranks that are the processes of an MPI communicator.
///
/// - **On one machine** they share memory, and MPI serves to find one another at construction; no call after that is
///   MPI's, so any thread level will do. Buffers from `allocate` are worked on where they lie (the Reducer's buckets are);
///   others are copied through a staging area.
/// - **On several machines**, or where they cannot share memory (`describe()` says why), they send messages, in a
///   communicator of their own. MPI moves these only inside calls: of `progress()`, `test()` and `wait()`. It must have
///   been initialised for the threads from which these are called (MPI_THREAD_MULTIPLE: all).
/// - **On several machines with several ranks each**, the same number on all, an all-reduce does both: it is reduced on each
///   machine, then between them, so that little crosses the network.
/// - Sums are made by the kernel of ThreadBackend, in rank order: the bits are the same, for every bucket and overlap policy.
///   In the case just named they are made in rank order on each machine and then in the machines' order: the same for every
///   run and policy, but others than ThreadBackend's, and types of 16 and 8 bits are rounded twice. `MpiOptions::reproducible` sends
///   messages between all ranks instead, which costs as many times the traffic as a machine has ranks.
/// - If a rank fails, leaves early, dies or reaches its time limit, every other rank's wait throws an Error that names
///   it. From then on every call on any communicator of the same origin throws the same. (That a process on another machine has
///   died shows by a TCP connection between neighbours; where none is to be had, by the time limit.) Keep the launcher from ending the survivors too, where they are to go on
///   (Open MPI: `mpirun --enable-recovery`).
/// - MPI is neither initialised nor finalised here; handles may outlive it.
class MpiBackend : public detail::EngineCollectives<MpiBackend, collective::Engine> {
public:
    /// The ranks of `comm` (a `boost::mpi::communicator` converts to one), which stays yours, and may be freed afterwards.
    /// Collective over it; MPI's own calls at construction have no time limit. Throws Error(invalid_argument) where MPI is
    /// not initialised, and Error(parameter_mismatch) on every rank where their options differ.
    explicit MpiBackend(MPI_Comm comm, MpiOptions options = {}) {
        check_mpi();
        const Ranks ranks(comm, options.domain);
        check_options(ranks, options);
        std::string problem;
        const bool several = ranks.machine_count > 1;
        if (several && ranks.machine_count == ranks.size) problem = "one on each machine";
        else if (!options.shared_memory) problem = "shared memory is switched off";
        else if (several && options.reproducible) problem = "sums are to be reproducible";
        else if (!detail::HierarchicalEngine::is_even(ranks.machines)) problem = "machines have different numbers of them";

        Sharing sharing;
        if (problem.empty()) sharing = share_memory(ranks, options, problem);
        if (!sharing.engine) {
            engine_ = send_messages(ranks, options, {});
            description_ = ranks.describe() + " that send messages (" + problem + ")";
        } else if (!several) {
            engine_ = sharing.engine;
            description_ = ranks.describe() + " that share memory";
        } else {
            engine_ = detail::HierarchicalEngine::combine(send_messages(ranks, options, sharing), sharing.engine, ranks.machines);
            description_ = ranks.describe() + " that share memory on each machine, and send messages between them";
        }
        int level = MPI_THREAD_SINGLE;
        MPI_Query_thread(&level);
        wants_progress_thread_ = several && level == MPI_THREAD_MULTIPLE;
        gradsync::detail::check_mpi(MPI_Barrier(comm), "MPI_Barrier");  // what ends a rank from now on ends no other rank's construction
    }

    int rank() const noexcept { return engine_->rank(); }
    int size() const noexcept { return engine_->size(); }

    /// Between machines messages move only inside MPI's calls: those of a thread, if MPI_THREAD_MULTIPLE allows it.
    bool wants_progress_thread() const noexcept { return wants_progress_thread_; }

    /// How the ranks reach one another, and why not by the faster way.
    const std::string& describe() const noexcept { return description_; }

    /// Memory in which collectives are fastest; see the concept.
    collective::Memory allocate(std::size_t bytes) { return engine_->allocate(bytes); }

private:
    friend EngineCollectives;
    using ProcessWorld = shared_memory::ProcessWorld;
    using ProcessEngine = shared_memory::ProcessEngine;
    using Segment = shared_memory::Segment;

    MpiBackend(std::shared_ptr<collective::Engine> engine, std::string description, bool wants_progress_thread) noexcept
        : engine_(std::move(engine)), description_(std::move(description)), wants_progress_thread_(wants_progress_thread) {}

    int world_rank() const noexcept { return engine_->world_rank(rank()); }
    const std::shared_ptr<collective::Engine>& shared_engine() const noexcept { return engine_; }
    MpiBackend join(const collective::Group& group) { return MpiBackend(engine_->split(group), description_, wants_progress_thread_); }

    static void check_mpi() {
        int initialised = 0, finalised = 0;
        MPI_Initialized(&initialised);
        MPI_Finalized(&finalised);
        if (!initialised || finalised)
            throw Error(Errc::invalid_argument, finalised ? "MpiBackend: MPI is finalised already; make the backend before"
                                                          : "MpiBackend: MPI is not initialised; make a boost::mpi::environment, or call MPI_Init, first");
    }

    /// Where the ranks of a communicator run.
    struct Ranks {
        Ranks(MPI_Comm comm_, int domain) : comm(comm_) {
            MPI_Comm_rank(comm, &rank);
            MPI_Comm_size(comm, &size);
            MPI_Comm whole = MPI_COMM_NULL;
            gradsync::detail::check_mpi(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &whole), "MPI_Comm_split_type");
            gradsync::detail::check_mpi(MPI_Comm_split(whole, std::max(domain, -1) + 1, rank, &machine), "MPI_Comm_split");
            MPI_Comm_free(&whole);
            MPI_Comm_rank(machine, &rank_here);
            MPI_Comm_size(machine, &size_here);
            int first = rank;  // its number names the machine
            gradsync::detail::check_mpi(MPI_Bcast(&first, 1, MPI_INT, 0, machine), "MPI_Bcast");
            machines = exchange(first, comm);
            for (int r = 0; r < size; ++r) machine_count += machines[static_cast<std::size_t>(r)] == r;
        }
        ~Ranks() { MPI_Comm_free(&machine); }
        Ranks(const Ranks&) = delete;
        Ranks& operator=(const Ranks&) = delete;

        /// `own` of all ranks of a communicator.
        template <class T>
        static std::vector<T> exchange(const T& own, MPI_Comm among) {
            int count = 0;
            MPI_Comm_size(among, &count);
            std::vector<T> all(static_cast<std::size_t>(count));
            gradsync::detail::check_mpi(MPI_Allgather(&own, sizeof own, MPI_BYTE, all.data(), sizeof own, MPI_BYTE, among), "MPI_Allgather");
            return all;
        }

        std::vector<int> all() const {
            std::vector<int> numbers(static_cast<std::size_t>(size));
            std::iota(numbers.begin(), numbers.end(), 0);
            return numbers;
        }
        /// Those on this machine.
        std::vector<int> neighbours() const { return exchange(rank, machine); }

        /// "4 processes on 2 machines"
        std::string describe() const {
            const auto counted = [](int count, const char* one, const char* many) { return std::to_string(count) + (count == 1 ? one : many); };
            return counted(size, " process", " processes") + (machine_count > 1 ? " on " + std::to_string(machine_count) + " machines" : "");
        }

        MPI_Comm comm;
        MPI_Comm machine = MPI_COMM_NULL;  ///< the ranks on this one
        int rank = 0, size = 1;
        int rank_here = 0, size_here = 1;
        std::vector<int> machines;  ///< of all ranks
        int machine_count = 0;
    };

    static void check_options(const Ranks& ranks, const MpiOptions& options) {
        const bool positive = options.timeout > std::chrono::nanoseconds::zero();
        const auto all = Ranks::exchange(static_cast<std::uint8_t>(positive * 4 + options.shared_memory * 2 + options.reproducible), ranks.comm);
        if (!positive) throw Error(Errc::invalid_argument, "the time limit of a backend must be positive");
        const auto other = std::find_if(all.begin(), all.end(), [&](std::uint8_t o) { return o != all[0]; });
        if (other != all.end())
            throw Error(Errc::parameter_mismatch,
                        "MpiBackend: rank " + std::to_string(other - all.begin()) + " has other MpiOptions than rank 0; give all ranks the same",
                        {.operation = "MpiBackend", .rank = ranks.rank, .peer = static_cast<int>(other - all.begin())});
    }

    /// What the ranks of one machine have in common.
    struct Sharing {
        std::shared_ptr<ProcessWorld> world;
        std::shared_ptr<ProcessEngine> engine;
    };

    /// Nothing on any rank where that cannot be on some machine, for this `problem`.
    static Sharing share_memory(const Ranks& ranks, const MpiOptions& options, std::string& problem) {
        const std::size_t room = ProcessEngine::bytes(static_cast<std::size_t>(ranks.size_here));
        const bool creates = ranks.rank_here == 0;
        // The creator's object lives until all have opened theirs.
        const Segment created = creates ? Segment::attempt(problem, [&] { return ProcessWorld::create(ranks.size, room); }) : Segment();
        Segment::Ticket ticket = created.ticket();
        gradsync::detail::check_mpi(MPI_Bcast(&ticket, sizeof ticket, MPI_BYTE, 0, ranks.machine), "MPI_Bcast");
        Segment own = ticket.descriptor >= 0 ? Segment::attempt(problem, [&] { return Segment::open(ticket); }) : Segment();
        const auto good = Ranks::exchange(static_cast<std::uint8_t>(own.data() != nullptr), ranks.comm);
        if (const auto bad = std::find(good.begin(), good.end(), 0); bad != good.end()) {
            problem = "they cannot share memory: " + (problem.empty() ? "see rank " + std::to_string(bad - good.begin()) : problem) +
                      "; run them as one user in one container, with /proc mounted";
            return {};
        }
        auto world = ProcessWorld::join(std::move(own), ranks.rank, ranks.size, ranks.size_here);
        auto memory = world->memory();
        auto engine = std::make_shared<ProcessEngine>(world, std::make_shared<shared_memory::Regions>(), ranks.neighbours(), ranks.rank_here,
                                                      std::move(memory), 0, options.timeout);
        return {std::move(world), std::move(engine)};
    }

    /// `sharing`: what fails with it, if anything.
    static std::shared_ptr<message_passing::MessageEngine> send_messages(const Ranks& ranks, const MpiOptions& options, const Sharing& sharing) {
        using namespace message_passing;
        auto transport = std::make_unique<gradsync::detail::MpiTransport>(ranks.comm);
        const auto processes = Ranks::exchange(collective::ProcessIdentity::own(), ranks.comm);
        auto world = sharing.world ? MessageWorld::make(std::move(transport), processes, ranks.size_here, sharing.world->shared_state(),
                                                        sharing.world->chores())
                                   : MessageWorld::make(std::move(transport), processes, ranks.size_here);
        watch(*world, ranks, processes);
        return std::make_shared<MessageEngine>(std::move(world), ranks.all(), ranks.rank, 0, std::make_shared<KnownMemory>(), options.timeout);
    }

    /// Ranks that do not see one another's processes have themselves told by the network.
    static void watch(message_passing::MessageWorld& world, const Ranks& ranks, const std::vector<collective::ProcessIdentity>& processes) {
        const std::uint64_t own = processes[static_cast<std::size_t>(ranks.rank)].system;
        const auto apart = [&](int r) { return own == 0 || processes[static_cast<std::size_t>(r)].system != own; };
        bool any = false;
        for (int r = 0; r < ranks.size; ++r) any |= r != ranks.rank && apart(r);
        auto lifeline = std::make_unique<message_passing::Lifeline>();
        const auto addresses = Ranks::exchange(any ? lifeline->listen() : message_passing::Lifeline::Address(), ranks.comm);
        if (!any) return;
        lifeline->connect(ranks.rank, addresses, std::chrono::seconds(2), apart);
        world.hold(std::move(lifeline));
    }

    std::shared_ptr<collective::Engine> engine_;
    std::string description_;
    bool wants_progress_thread_ = false;
};

static_assert(Backend<MpiBackend>);

}  // namespace gradsync::inline v0
