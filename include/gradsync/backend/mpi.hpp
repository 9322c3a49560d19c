#pragma once

// The C interface alone: the C++ bindings are gone from the standard, and cost 0.4 s of compile time.
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX
#endif
#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "../core/backend.hpp"
#include "../core/clock.hpp"
#include "../core/error.hpp"
#include "../kernel/host_buffer.hpp"
#include "../shared_memory/process_engine.hpp"
#include "host_collectives.hpp"

namespace gradsync::inline v0 {

/// Options of `MpiBackend`, the same on all ranks.
struct MpiOptions {
    std::chrono::nanoseconds timeout = std::chrono::minutes(5);  ///< of every wait; `set_timeout` changes it
};

/// Memory of `MpiBackend::allocate`: this rank's part of what all ranks have mapped; where that was not to be had, of
/// this process alone.
class MpiBuffer {
public:
    MpiBuffer() = default;
    explicit MpiBuffer(kernel::HostBuffer own) noexcept : own_(std::move(own)), data_(own_.data()) {}
    MpiBuffer(std::shared_ptr<shared_memory::Regions> regions, std::uint32_t number, shared_memory::Segment segment, std::size_t offset)
        : regions_(std::move(regions)), number_(number), segment_(std::move(segment)), data_(segment_.data() + offset) {
        regions_->add(number_, segment_.data(), segment_.bytes());
    }
    MpiBuffer(MpiBuffer&& other) noexcept { swap(other); }
    MpiBuffer& operator=(MpiBuffer&& other) noexcept {
        MpiBuffer(std::move(other)).swap(*this);
        return *this;
    }
    ~MpiBuffer() {
        if (regions_) regions_->remove(number_);
    }

    void* data() const noexcept { return data_; }

    void swap(MpiBuffer& other) noexcept {
        std::swap(regions_, other.regions_);
        std::swap(number_, other.number_);
        segment_.swap(other.segment_);
        own_.swap(other.own_);
        std::swap(data_, other.data_);
    }

private:
    std::shared_ptr<shared_memory::Regions> regions_;
    std::uint32_t number_ = 0;
    shared_memory::Segment segment_;
    kernel::HostBuffer own_;
    void* data_ = nullptr;
};

/// Ranks that are the processes of an MPI communicator, all on one machine: they share memory, and MPI serves to find one
/// another at construction; no call after that is MPI's. (Ranks on several machines are refused.)
///
/// - Reductions run in memory that all ranks have mapped, with the same kernel as ThreadBackend and in the same order:
///   the bits are the same. Buffers from `allocate` are worked on where they lie (the Reducer's buckets are); others are
///   copied through a staging area.
/// - Collectives are advanced inside `progress()`, `test()` and `wait()` of any rank; there is no thread but the user's.
///   Any thread level of MPI will do, and a handle may be used from several threads of its rank.
/// - If a rank fails, leaves early, dies or reaches its time limit, every other rank's wait throws an Error that names
///   it. From then on every call on any communicator of the same origin throws the same. Keep the launcher from ending
///   the survivors too, where they are to go on (Open MPI: `mpirun --enable-recovery`).
/// - MPI is neither initialised nor finalised here; handles may outlive it.
class MpiBackend : public detail::HostCollectives<MpiBackend, shared_memory::ProcessEngine> {
    using ProcessWorld = shared_memory::ProcessWorld;
    using Engine = shared_memory::ProcessEngine;
    using Segment = shared_memory::Segment;

public:
    /// The ranks of `comm` (a `boost::mpi::communicator` converts to one), which is used here alone and may be freed
    /// afterwards. Collective over it; MPI's own calls at construction have no time limit. Throws
    /// Error(invalid_argument), the same on every rank, where MPI is not initialised, the ranks run on several machines,
    /// or they cannot share memory.
    explicit MpiBackend(MPI_Comm comm, MpiOptions options = {}) {
        int initialised = 0, finalised = 0;
        MPI_Initialized(&initialised);
        MPI_Finalized(&finalised);
        if (!initialised || finalised)
            throw Error(Errc::invalid_argument, finalised ? "MpiBackend: MPI is finalised already; make the backend before"
                                                          : "MpiBackend: MPI is not initialised; make a boost::mpi::environment, or call MPI_Init, first");
        if (options.timeout <= std::chrono::nanoseconds::zero())
            throw Error(Errc::invalid_argument, "the time limit of a backend must be positive");
        int rank = 0, size = 0;
        MPI_Comm_rank(comm, &rank);
        MPI_Comm_size(comm, &size);
        refuse_several_machines(comm, size);

        const std::size_t room = Engine::bytes(static_cast<std::size_t>(size));
        std::string problem;
        // The creator's object lives until all have opened theirs.
        const Segment created = rank == 0 ? attempt(problem, [&] { return ProcessWorld::create(size, room); }) : Segment();
        Segment::Ticket ticket = created.ticket();
        MPI_Bcast(&ticket, sizeof ticket, MPI_BYTE, 0, comm);
        Segment own = problem.empty() && ticket.descriptor >= 0 ? attempt(problem, [&] { return Segment::open(ticket); }) : Segment();
        int good = own.data() != nullptr ? 1 : 0, all_good = 0;
        MPI_Allreduce(&good, &all_good, 1, MPI_INT, MPI_MIN, comm);
        if (!all_good)
            throw Error(Errc::invalid_argument, "MpiBackend: the ranks cannot share memory (" + (problem.empty() ? "another rank knows why" : problem) +
                                                    "); run them as one user in one container, with /proc mounted");

        const auto world = ProcessWorld::join(std::move(own), rank, size);
        std::vector<int> world_ranks;
        for (int r = 0; r < size; ++r) world_ranks.push_back(r);
        engine_ = std::make_shared<Engine>(world, std::make_shared<shared_memory::Regions>(), std::move(world_ranks), rank, world->memory(),
                                           first_region, options.timeout);
    }

    int rank() const noexcept { return engine_->rank(); }
    int size() const noexcept { return engine_->board().size(); }

    /// Memory that every rank has mapped, and each uses its part of; see the concept. Where the system has no such memory
    /// left, of this process alone: collectives on it are slower.
    MpiBuffer allocate(std::size_t bytes) {
        if (bytes == 0 || size() == 1) return MpiBuffer(kernel::HostBuffer(bytes));
        constexpr std::size_t page = 4096, huge_page = std::size_t{2} << 20;
        const std::size_t unit = bytes >= huge_page ? huge_page : page;
        const std::size_t stride = (bytes + unit - 1) / unit * unit;
        std::string problem;
        Segment created;
        Offer offer;
        if (rank() == 0) {
            created = attempt(problem, [&] { return Segment::create(stride * static_cast<std::size_t>(size())); });
            offer = {created.ticket(), engine_->world()->next_region()};
        }
        broadcast({&offer, sizeof offer, DType::u8, MemorySpace::host}, 0).wait();
        Segment segment = open(offer, problem);
        if (!all_have(segment)) return MpiBuffer(kernel::HostBuffer(bytes));
        return MpiBuffer(engine_->regions(), static_cast<std::uint32_t>(offer.region), std::move(segment),
                         stride * static_cast<std::size_t>(rank()));
    }

private:
    friend HostCollectives;

    static constexpr std::uint32_t first_region = 0;

    explicit MpiBackend(std::shared_ptr<Engine> engine) noexcept : engine_(std::move(engine)) {}

    int world_rank() const noexcept { return engine_->board().world_rank(rank()); }
    const std::shared_ptr<Engine>& shared_engine() const noexcept { return engine_; }

    template <class F>
    static Segment attempt(std::string& problem, F&& make) {
        try {
            return make();
        } catch (const std::system_error& error) {
            problem = error.what();
            return Segment();
        }
    }

    static void refuse_several_machines(MPI_Comm comm, int size) {
        MPI_Comm machine = MPI_COMM_NULL;
        int here = 0, most = 0;
        MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
        MPI_Comm_size(machine, &here);
        MPI_Comm_free(&machine);
        MPI_Allreduce(&here, &most, 1, MPI_INT, MPI_MAX, comm);
        if (most < size)
            throw Error(Errc::invalid_argument, "MpiBackend: the " + std::to_string(size) + " ranks run on several machines (" + std::to_string(most) +
                                                    " at most on one), which it does not support yet; run all of them on one");
    }

    /// A segment that its creator has for others, and the number that its region has everywhere.
    struct Offer {
        Segment::Ticket ticket;
        std::uint64_t region = 0;
    };

    static Segment open(const Offer& offer, std::string& problem) {
        return offer.ticket.descriptor < 0 ? Segment() : attempt(problem, [&] { return Segment::open(offer.ticket); });
    }

    /// Has every rank of this communicator its segment open? Until then those who created them keep theirs. Collective.
    bool all_have(const Segment& segment) {
        std::int32_t good = segment.data() != nullptr ? 1 : 0;
        all_reduce({&good, 1, DType::i32, MemorySpace::host}, ReduceOp::min).wait();
        return good != 0;
    }

    /// Every group's first member makes its memory; all ranks of this communicator hear of all of it.
    MpiBackend join(const detail::Group& group) {
        const std::size_t room = Engine::bytes(group.members.size());
        std::string problem;
        Segment created;
        Offer own;
        if (group.rank == 0) {
            created = attempt(problem, [&] { return Segment::create(room); });
            own = {created.ticket(), engine_->world()->next_region()};
        }
        std::vector<Offer> offers(static_cast<std::size_t>(size()));
        all_gather({&own, sizeof own, DType::u8, MemorySpace::host},
                   {offers.data(), offers.size() * sizeof(Offer), DType::u8, MemorySpace::host})
            .wait();
        const Offer& offer = offers[static_cast<std::size_t>(group.members.front())];
        auto segment = std::make_shared<Segment>(open(offer, problem));
        if (!all_have(*segment))
            throw Error(Errc::invalid_argument, "MpiBackend::split on rank " + std::to_string(world_rank()) + ": no shared memory of " +
                                                    std::to_string(room) + " bytes" + (problem.empty() ? "" : " (" + problem + ")"),
                        {.operation = "split", .rank = world_rank()});
        std::vector<int> world_ranks;
        for (const int r : group.members) world_ranks.push_back(engine_->board().world_rank(r));
        std::shared_ptr<std::byte> memory(segment, segment->data());
        return MpiBackend(std::make_shared<Engine>(engine_->world(), engine_->regions(), std::move(world_ranks), group.rank,
                                                   std::move(memory), static_cast<std::uint32_t>(offer.region), timeout()));
    }

    std::shared_ptr<Engine> engine_;
};

static_assert(Backend<MpiBackend>);

}  // namespace gradsync::inline v0
