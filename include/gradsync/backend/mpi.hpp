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
#include "host_collectives.hpp"
#include "mpi_transport.hpp"

namespace gradsync::inline v0 {

/// Options of `MpiBackend`, the same on all ranks.
struct MpiOptions {
    std::chrono::nanoseconds timeout = std::chrono::minutes(5);  ///< of every wait; `set_timeout` changes it
    bool shared_memory = true;  ///< ranks of one machine share memory; else they send messages like all others
    bool reproducible = false;  ///< sums in rank order, the bits of ThreadBackend, also where several ranks run on each of several machines
};

/// Ranks that are the processes of an MPI communicator.
///
/// - **On one machine** they share memory, and MPI serves to find one another at construction; no call after that is
///   MPI's, so any thread level will do. Buffers from `allocate` are worked on where they lie (the Reducer's buckets are);
///   others are copied through a staging area.
/// - **On several machines**, or where they cannot share memory (`describe()` says why), they send messages, in a
///   communicator of their own. MPI moves these only inside calls: of `progress()`, `test()` and `wait()`. It must have
///   been initialised for the threads from which these are called (MPI_THREAD_MULTIPLE: all).
/// - Sums are made by the kernel of ThreadBackend, in rank order: the bits are the same.
/// - If a rank fails, leaves early, dies or reaches its time limit, every other rank's wait throws an Error that names
///   it. From then on every call on any communicator of the same origin throws the same. (That a process has died on
///   another machine shows only by the time limit.) Keep the launcher from ending the survivors too, where they are to go on
///   (Open MPI: `mpirun --enable-recovery`).
/// - MPI is neither initialised nor finalised here; handles may outlive it.
class MpiBackend : public detail::HostCollectives<MpiBackend, collective::Engine> {
public:
    /// The ranks of `comm` (a `boost::mpi::communicator` converts to one), which stays yours, and may be freed afterwards.
    /// Collective over it; MPI's own calls at construction have no time limit. Throws Error(invalid_argument) where MPI is
    /// not initialised, and Error(parameter_mismatch) on every rank where their options differ.
    explicit MpiBackend(MPI_Comm comm, MpiOptions options = {}) {
        check_mpi();
        if (options.timeout <= std::chrono::nanoseconds::zero())
            throw Error(Errc::invalid_argument, "the time limit of a backend must be positive");
        const Ranks ranks(comm);
        check_options(ranks, options);
        std::string problem = "shared memory is switched off";
        if (ranks.machines > 1) problem = "they run on " + std::to_string(ranks.machines) + " machines";
        else if (options.shared_memory && (engine_ = share_memory(ranks, options, problem)))
            description_ = counted(ranks.size, "process") + " that share memory";
        if (!engine_) {
            engine_ = send_messages(ranks, options);
            description_ = counted(ranks.size, "process") + " that send messages (" + problem + ")";
        }
    }

    int rank() const noexcept { return engine_->rank(); }
    int size() const noexcept { return engine_->size(); }

    /// How the ranks reach one another, and why not by the faster way.
    const std::string& describe() const noexcept { return description_; }

    /// Memory in which collectives are fastest; see the concept.
    collective::Memory allocate(std::size_t bytes) { return engine_->allocate(bytes); }

private:
    friend HostCollectives;
    using ProcessWorld = shared_memory::ProcessWorld;
    using ProcessEngine = shared_memory::ProcessEngine;
    using Segment = shared_memory::Segment;

    MpiBackend(std::shared_ptr<collective::Engine> engine, std::string description) noexcept
        : engine_(std::move(engine)), description_(std::move(description)) {}

    int world_rank() const noexcept { return engine_->world_rank(rank()); }
    const std::shared_ptr<collective::Engine>& shared_engine() const noexcept { return engine_; }
    MpiBackend join(const collective::Group& group) { return MpiBackend(engine_->split(group), description_); }

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
        explicit Ranks(MPI_Comm comm_) : comm(comm_) {
            MPI_Comm_rank(comm, &rank);
            MPI_Comm_size(comm, &size);
            MPI_Comm machine = MPI_COMM_NULL;
            MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
            int place = 0;
            MPI_Comm_rank(machine, &place);
            MPI_Comm_size(machine, &here);
            MPI_Comm_free(&machine);
            const int first = place == 0;
            MPI_Allreduce(&first, &machines, 1, MPI_INT, MPI_SUM, comm);
        }

        /// `own` of all ranks.
        template <class T>
        std::vector<T> exchange(const T& own) const {
            std::vector<T> all(static_cast<std::size_t>(size));
            MPI_Allgather(&own, sizeof own, MPI_BYTE, all.data(), sizeof own, MPI_BYTE, comm);
            return all;
        }
        std::vector<int> numbers() const {
            std::vector<int> all(static_cast<std::size_t>(size));
            std::iota(all.begin(), all.end(), 0);
            return all;
        }

        MPI_Comm comm;
        int rank = 0, size = 1;
        int here = 1;      ///< ranks on this machine
        int machines = 0;
    };

    static void check_options(const Ranks& ranks, const MpiOptions& options) {
        const auto all = ranks.exchange<std::uint8_t>(static_cast<std::uint8_t>(options.shared_memory * 2 + options.reproducible));
        const auto other = std::find_if(all.begin(), all.end(), [&](std::uint8_t o) { return o != all[0]; });
        if (other != all.end())
            throw Error(Errc::parameter_mismatch,
                        "MpiBackend: rank " + std::to_string(other - all.begin()) + " has other MpiOptions than rank 0; give all ranks the same",
                        {.operation = "MpiBackend", .rank = ranks.rank, .peer = static_cast<int>(other - all.begin())});
    }

    /// Null where that cannot be, for this `problem`.
    static std::shared_ptr<collective::Engine> share_memory(const Ranks& ranks, const MpiOptions& options, std::string& problem) {
        const std::size_t room = ProcessEngine::bytes(static_cast<std::size_t>(ranks.size));
        problem.clear();
        // The creator's object lives until all have opened theirs.
        const Segment created = ranks.rank == 0 ? Segment::attempt(problem, [&] { return ProcessWorld::create(ranks.size, room); }) : Segment();
        Segment::Ticket ticket = created.ticket();
        MPI_Bcast(&ticket, sizeof ticket, MPI_BYTE, 0, ranks.comm);
        Segment own = problem.empty() && ticket.descriptor >= 0 ? Segment::attempt(problem, [&] { return Segment::open(ticket); }) : Segment();
        const auto good = ranks.exchange<std::uint8_t>(own.data() != nullptr);
        if (const auto bad = std::find(good.begin(), good.end(), 0); bad != good.end()) {
            problem = "they cannot share memory: " + (problem.empty() ? "see rank " + std::to_string(bad - good.begin()) : problem) +
                      "; run them as one user in one container, with /proc mounted";
            return nullptr;
        }
        const auto world = ProcessWorld::join(std::move(own), ranks.rank, ranks.size);
        return std::make_shared<ProcessEngine>(world, std::make_shared<shared_memory::Regions>(), ranks.numbers(), ranks.rank, world->memory(), 0,
                                               options.timeout);
    }

    static std::shared_ptr<collective::Engine> send_messages(const Ranks& ranks, const MpiOptions& options) {
        using namespace message_passing;
        auto processes = ranks.exchange(collective::ProcessIdentity::own());
        auto world = MessageWorld::make(std::make_unique<detail::MpiTransport>(ranks.comm), std::move(processes), ranks.here);
        return std::make_shared<MessageEngine>(std::move(world), ranks.numbers(), ranks.rank, 0, std::make_shared<KnownMemory>(), options.timeout);
    }

    /// "1 process", "2 processes"
    static std::string counted(int count, const std::string& what) { return std::to_string(count) + ' ' + what + (count == 1 ? "" : "es"); }

    std::shared_ptr<collective::Engine> engine_;
    std::string description_;
};

static_assert(Backend<MpiBackend>);

}  // namespace gradsync::inline v0
