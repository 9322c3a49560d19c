#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "../bootstrap/mpi_rendezvous.hpp"
#include "../collective/engine.hpp"
#include "../collective/process.hpp"
#include "../core/backend.hpp"
#include "../core/clock.hpp"
#include "../core/error.hpp"
#include "../message_passing/message_engine.hpp"
#include "../shared_memory/process_engine.hpp"
#include "engine_collectives.hpp"
#include "hierarchical_engine.hpp"
#include "mpi_transport.hpp"

namespace gradsync::inline v0 {

/// What an `MpiBackend` does with the communicator that it is given (Boost.MPI's `comm_create_kind`).
enum class MpiCommunicator : std::uint8_t {
    duplicate,  ///< messages travel in a duplicate: yours stays yours, and may be freed afterwards. (Its largest tag, MPI_TAG_UB, is the
                ///< library's, for ranks that wait for one another at construction.)
    attach,     ///< they travel in yours, in which nobody else ever sends anything, no other backend either; it stays until MPI is
                ///< finalised. Its errors are returned as long (MPI_ERRORS_RETURN)
    take_ownership,  ///< the same, but it is the backend's, which frees it when the last handle is gone and another backend is made or
                     ///< goes later (not where its ranks have failed); where construction throws, leave it alone
};

/// Options of `MpiBackend`, the same on all ranks (but for `domain` and `timeout`).
struct MpiOptions {
    /// Of every wait, also for the others at construction; `set_timeout` changes it.
    std::chrono::nanoseconds timeout = std::chrono::minutes(5);
    bool shared_memory = true;  ///< ranks of one machine share memory; else they send messages like all others
    int domain = -1;            ///< if not -1, only ranks of one machine with the same number here share memory: a part of it
    bool reproducible = false;  ///< the bits of ThreadBackend, also where several ranks run on each of several machines
    MpiCommunicator communicator = MpiCommunicator::duplicate;
};

/// Ranks that are the processes of an MPI communicator.
///
/// - **On one machine** they share memory, and MPI serves to find one another at construction; no call after that is
///   MPI's, so any thread level will do. Buffers from `allocate` are worked on where they lie (the Reducer's buckets are);
///   others are copied through a staging area.
/// - **On several machines**, or where they cannot share memory (`describe()` says why), they send messages, in a
///   communicator of their own (`MpiCommunicator`). MPI moves these only inside calls: of `progress()`, `test()` and `wait()`. It must have
///   been initialised for the threads from which these are called (MPI_THREAD_MULTIPLE: all).
/// - **On several machines with several ranks each**, the same number on all, an all-reduce does both: it is reduced on each
///   machine, then between them, so that little crosses the network.
/// - Sums are made by the kernel of ThreadBackend, in rank order: the bits are the same, for every bucket and overlap policy.
///   In the case just named they are made in rank order on each machine and then in the machines' order: the same for every
///   run and policy, but others than ThreadBackend's, and types of 16 and 8 bits are rounded twice. `MpiOptions::reproducible` sends
///   messages between all ranks instead, which costs as many times the traffic as a machine has ranks.
/// - If a rank fails, leaves early, dies or reaches its time limit, every other rank's wait throws an Error that names
///   it. From then on every call on any communicator of the same origin throws the same. (That a process on another machine has
///   died shows by a TCP connection between neighbours; where none is to be had, by the time limit.) Keep the launcher from ending the
///   survivors too, where they are to go on (Open MPI: `mpirun --enable-recovery`).
/// - MPI is neither initialised nor finalised here; handles may outlive it.
class MpiBackend : public detail::EngineCollectives<MpiBackend, collective::Engine> {
public:
    /// The ranks of `comm` (a `boost::mpi::communicator` converts to one). Collective over it. Throws Error(invalid_argument) where MPI is
    /// not initialised, and for MPI_COMM_NULL, Error(timeout) where not all ranks come (see `MpiRendezvous`), and Error(parameter_mismatch)
    /// on every rank where their options differ.
    explicit MpiBackend(MPI_Comm comm, MpiOptions options = {}) {
        // A rank without a limit takes part in the exchange of options all the same: so the others hear of it.
        const bool limited = options.timeout > std::chrono::nanoseconds::zero();
        MpiRendezvous meeting(comm, {.timeout = limited ? options.timeout : MpiRendezvousOptions().timeout});
        check_options(meeting, comm, options);
        if (options.communicator != MpiCommunicator::duplicate) refuse_second(comm);
        const Ranks ranks(meeting, options.domain);
        std::string problem;
        const bool several = ranks.machine_count > 1;
        if (several && ranks.machine_count == ranks.size) problem = "one on each machine";
        else if (!options.shared_memory) problem = "shared memory is switched off";
        else if (several && options.reproducible) problem = "sums are to be reproducible";
        else if (!detail::HierarchicalEngine::is_even(ranks.machines)) problem = "machines have different numbers of them";

        Sharing sharing;
        if (problem.empty()) sharing = share_memory(meeting, ranks, options, problem);
        int level = MPI_THREAD_SINGLE;
        MPI_Query_thread(&level);
        paths_ = {ranks.machines, sharing.engine != nullptr, level == MPI_THREAD_MULTIPLE, problem, {}};
        if (sharing.engine && !several) {
            engine_ = sharing.engine;
        } else {
            auto messages = send_messages(meeting, comm, ranks, options, sharing, paths_.unwatched);
            if (sharing.engine) engine_ = detail::HierarchicalEngine::combine(std::move(messages), sharing.engine, ranks.machines);
            else engine_ = std::move(messages);
        }
        meeting.barrier();  // what ends a rank from now on ends no other rank's construction
        if (options.communicator == MpiCommunicator::take_ownership && sharing.engine && !several) {  // nothing is sent in it
            const std::lock_guard lock(bootstrap::mpi_mutex());
            MPI_Comm_free(&comm);
        }
    }

    int rank() const noexcept { return engine_->rank(); }
    int size() const noexcept { return engine_->size(); }

    /// Between machines messages move only inside MPI's calls: those of a thread, if MPI_THREAD_MULTIPLE allows it.
    bool wants_progress_thread() const { return paths_.any_thread && paths_.machine_count() > 1; }

    /// How the ranks reach one another, and why not by the faster way.
    std::string describe() const { return paths_.describe() + engine_->remark(); }

    /// Memory in which collectives are fastest; see the concept.
    collective::Memory allocate(std::size_t bytes) { return engine_->allocate(bytes); }

private:
    friend EngineCollectives;
    using ProcessWorld = shared_memory::ProcessWorld;
    using ProcessEngine = shared_memory::ProcessEngine;
    using Segment = shared_memory::Segment;

    /// How ranks reach one another.
    struct Paths {
        std::vector<int> machines;  ///< by rank: a number for its machine
        bool share = false;         ///< can those of one machine share memory?
        bool any_thread = false;    ///< does MPI let in any thread at any time?
        std::string problem;        ///< why memory is not shared
        std::string unwatched;      ///< whose death would not be noticed: ", but ...", or nothing

        int machine_count() const {
            std::vector<int> numbers = machines;
            std::sort(numbers.begin(), numbers.end());
            return static_cast<int>(std::unique(numbers.begin(), numbers.end()) - numbers.begin());
        }

        Paths of(const collective::Group& group) const {
            Paths part{{}, share, any_thread, problem, unwatched};
            for (const int member : group.members) part.machines.push_back(machines[static_cast<std::size_t>(member)]);
            return part;
        }

        /// "4 processes on 2 machines that ..."
        std::string describe() const {
            const auto counted = [](std::size_t count, const char* one, const char* many) {
                return std::to_string(count) + (count == 1 ? one : many);
            };
            const auto count = static_cast<std::size_t>(machine_count());
            const std::string text =
                counted(machines.size(), " process", " processes") + (count > 1 ? " on " + std::to_string(count) + " machines" : "");
            if (share && count == 1) return text + " that share memory";
            if (share && count < machines.size() && detail::HierarchicalEngine::is_even(machines))
                return text + " that share memory on each machine, and send messages between them" + unwatched;
            return text + " that send messages (" +
                   (!share                     ? problem
                    : count == machines.size() ? "one on each machine"
                                               : "machines have different numbers of them") +
                   ")" + unwatched;
        }
    };

    MpiBackend(std::shared_ptr<collective::Engine> engine, Paths paths) noexcept : engine_(std::move(engine)), paths_(std::move(paths)) {}

    int world_rank() const noexcept { return engine_->world_rank(rank()); }
    const std::shared_ptr<collective::Engine>& shared_engine() const noexcept { return engine_; }
    MpiBackend join(const collective::Group& group) { return MpiBackend(engine_->split(group), paths_.of(group)); }

    /// Where the ranks of a communicator run.
    struct Ranks {
        Ranks(MpiRendezvous& meeting, int domain) : rank(meeting.rank()), size(meeting.size()) {
            struct Place {
                collective::ProcessIdentity process;
                std::uint64_t host = 0;
                std::int64_t domain = 0;
            };
            char name[MPI_MAX_PROCESSOR_NAME] = {};
            int length = 0;
            {
                const std::lock_guard lock(bootstrap::mpi_mutex());
                MPI_Get_processor_name(name, &length);
            }
            const auto places = bootstrap::exchange(
                meeting,
                Place{collective::ProcessIdentity::own(), collective::detail::hash_bytes(name, static_cast<std::size_t>(length)), domain});
            for (int r = 0; r < size; ++r) {
                const Place& place = places[static_cast<std::size_t>(r)];
                one_machine &= place.host == places[0].host && place.process.machine == places[0].process.machine;
                // Memory is opened by way of processes: where their numbers mean something else, it cannot be.
                const auto first = std::find_if(places.begin(), places.end(), [&](const Place& p) {
                    return p.host == place.host && p.process.system == place.process.system && p.domain == place.domain;
                });
                machines.push_back(static_cast<int>(first - places.begin()));
                machine_count += machines.back() == r;
                processes.push_back(place.process);
            }
            for (int r = 0; r < size; ++r) {
                if (machines[static_cast<std::size_t>(r)] != machines[static_cast<std::size_t>(rank)]) continue;
                if (r == rank) rank_here = static_cast<int>(neighbours.size());
                neighbours.push_back(r);
            }
        }

        int size_here() const noexcept { return static_cast<int>(neighbours.size()); }

        std::vector<int> all() const {
            std::vector<int> numbers(static_cast<std::size_t>(size));
            std::iota(numbers.begin(), numbers.end(), 0);
            return numbers;
        }
        int rank, size;
        int rank_here = 0;
        std::vector<collective::ProcessIdentity> processes;  ///< of all ranks
        std::vector<int> machines;                           ///< of all ranks: the first rank on each one's, which names it
        std::vector<int> neighbours;                         ///< the ranks on this one
        int machine_count = 0;
        bool one_machine = true;  ///< whatever their domains
    };

    static void check_options(MpiRendezvous& meeting, MPI_Comm comm, const MpiOptions& options) {
        const bool limited = options.timeout > std::chrono::nanoseconds::zero();
        const bool takes_mpis_own =
            options.communicator == MpiCommunicator::take_ownership && (comm == MPI_COMM_WORLD || comm == MPI_COMM_SELF);
        const auto all =
            bootstrap::exchange(meeting, static_cast<std::uint8_t>(static_cast<int>(options.communicator) * 16 + takes_mpis_own * 8 +
                                                                   limited * 4 + options.shared_memory * 2 + options.reproducible));
        if (!limited) throw Error(Errc::invalid_argument, "the time limit of a backend must be positive");
        if (takes_mpis_own)
            throw Error(
                Errc::invalid_argument,
                "MpiBackend: MPI_COMM_WORLD and MPI_COMM_SELF are not to be freed, so they cannot be taken; let the backend attach or duplicate");
        const auto other = std::find_if(all.begin(), all.end(), [&](std::uint8_t o) { return o != all[0]; });
        if (other != all.end())
            throw Error(
                Errc::parameter_mismatch,
                "MpiBackend: rank " + std::to_string(other - all.begin()) + " has other MpiOptions than rank 0; give all ranks the same",
                {.operation = "MpiBackend", .rank = meeting.rank(), .peer = static_cast<int>(other - all.begin())});
    }

    /// Messages of two backends would be taken for one another's, those of one that has failed also by another that comes after it.
    static void refuse_second(MPI_Comm comm) {
        const std::lock_guard lock(bootstrap::mpi_mutex());
        static const int mark = [] {
            int key = MPI_KEYVAL_INVALID;
            MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, MPI_COMM_NULL_DELETE_FN, &key, nullptr);
            return key;
        }();
        void* value = nullptr;
        int found = 0;
        MPI_Comm_get_attr(comm, mark, &value, &found);
        if (found)
            throw Error(
                Errc::invalid_argument,
                "MpiBackend: another backend had this communicator before, and its messages may still come; let this one duplicate it");
        MPI_Comm_set_attr(comm, mark, nullptr);
    }

    /// What the ranks of one machine have in common.
    struct Sharing {
        std::shared_ptr<ProcessWorld> world;
        std::shared_ptr<ProcessEngine> engine;
    };

    /// Nothing on any rank where that cannot be on some machine, for this `problem`.
    static Sharing share_memory(MpiRendezvous& meeting, const Ranks& ranks, const MpiOptions& options, std::string& problem) {
        const std::size_t room = ProcessEngine::bytes(ranks.neighbours.size());
        const bool creates = ranks.rank_here == 0;
        // The creator's object lives until all have opened theirs.
        const Segment created = creates ? Segment::attempt(problem, [&] { return ProcessWorld::create(ranks.size, room); }) : Segment();
        const Segment::Ticket ticket = bootstrap::exchange(meeting, created.ticket())[static_cast<std::size_t>(ranks.neighbours.front())];
        Segment own = ticket.descriptor >= 0 ? Segment::attempt(problem, [&] { return Segment::open(ticket); }) : Segment();
        const auto good = bootstrap::exchange(meeting, static_cast<std::uint8_t>(own.data() != nullptr));
        if (const auto bad = std::find(good.begin(), good.end(), 0); bad != good.end()) {
            problem = "they cannot share memory: " + (problem.empty() ? "see rank " + std::to_string(bad - good.begin()) : problem) +
                      "; run them as one user in one container, with /proc mounted";
            return {};
        }
        auto world = ProcessWorld::join(std::move(own), ranks.rank, ranks.size, ranks.size_here());
        auto memory = world->memory();
        auto engine = std::make_shared<ProcessEngine>(world, std::make_shared<shared_memory::Regions>(), ranks.neighbours, ranks.rank_here,
                                                      std::move(memory), 0, options.timeout);
        return {std::move(world), std::move(engine)};
    }

    /// In `comm` or a duplicate of it. `sharing`: what fails with it, if anything. `unwatched`: see Paths.
    static std::shared_ptr<message_passing::MessageEngine> send_messages(MpiRendezvous& meeting, MPI_Comm comm, const Ranks& ranks,
                                                                         const MpiOptions& options, const Sharing& sharing,
                                                                         std::string& unwatched) {
        using namespace message_passing;
        if (options.communicator == MpiCommunicator::duplicate) comm = meeting.duplicate();
        auto transport =
            std::make_unique<gradsync::detail::MpiTransport>(comm, options.communicator != MpiCommunicator::attach, ranks.one_machine);
        auto world = sharing.world ? MessageWorld::make(std::move(transport), ranks.processes, ranks.size_here(),
                                                        sharing.world->shared_state(), sharing.world->chores())
                                   : MessageWorld::make(std::move(transport), ranks.processes, ranks.size_here());
        unwatched = watch(*world, meeting, ranks);
        return std::make_shared<MessageEngine>(std::move(world), ranks.all(), ranks.rank, 0, std::make_shared<KnownMemory>(),
                                               options.timeout);
    }

    /// Ranks that do not see one another's processes have themselves told by the network; as far as that works, see Paths::unwatched.
    static std::string watch(message_passing::MessageWorld& world, MpiRendezvous& meeting, const Ranks& ranks) {
        const std::uint64_t own = ranks.processes[static_cast<std::size_t>(ranks.rank)].system;
        const auto apart = [&](int r) { return own == 0 || ranks.processes[static_cast<std::size_t>(r)].system != own; };
        bool any = false;
        for (int r = 0; r < ranks.size; ++r) any |= r != ranks.rank && apart(r);
        auto lifeline = std::make_unique<message_passing::Lifeline>();
        const auto addresses = bootstrap::exchange(meeting, any ? lifeline->listen() : message_passing::Lifeline::Address());
        if (!any) return {};
        const std::size_t wanted = lifeline->connect(ranks.rank, addresses, std::chrono::seconds(2), apart), got = lifeline->lines();
        world.hold(std::move(lifeline));
        if (got == wanted) return {};
        return ", but " + std::to_string(wanted - got) + " of " + std::to_string(wanted) +
               " connections that tell of a process's death could not be made: it would show by the time limit only";
    }

    std::shared_ptr<collective::Engine> engine_;
    Paths paths_;
};

static_assert(Backend<MpiBackend>);

}  // namespace gradsync::inline v0
