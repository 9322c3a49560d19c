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
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "../core/error.hpp"
#include "rendezvous.hpp"

namespace gradsync::inline v0 {

/// Ranks that have MPI already. The communicator stays yours, and lives as long as this. MPI's own calls have no time limit.
class MpiRendezvous {
public:
    /// Throws Error(invalid_argument) where MPI is not initialised.
    explicit MpiRendezvous(MPI_Comm comm) : comm_(comm) {
        int initialised = 0, finalised = 0;
        MPI_Initialized(&initialised);
        MPI_Finalized(&finalised);
        if (!initialised || finalised)
            throw Error(Errc::invalid_argument, "MpiRendezvous: MPI is not at work; call it between MPI_Init and MPI_Finalize");
        MPI_Comm_rank(comm_, &rank_);
        MPI_Comm_size(comm_, &size_);
    }

    int rank() const noexcept { return rank_; }
    int size() const noexcept { return size_; }

    /// See the concept `Rendezvous`.
    Blob broadcast(std::span<const std::byte> own) {
        if (rank_ == 0) bootstrap::check_blob(own.size(), "broadcast", 0);
        int bytes = static_cast<int>(own.size());
        check(MPI_Bcast(&bytes, 1, MPI_INT, 0, comm_), "MPI_Bcast");
        Blob blob(static_cast<std::size_t>(bytes));
        if (rank_ == 0) blob.assign(own.begin(), own.end());
        check(MPI_Bcast(blob.data(), bytes, MPI_BYTE, 0, comm_), "MPI_Bcast");
        return blob;
    }

    std::vector<Blob> all_gather(std::span<const std::byte> own) {
        bootstrap::check_blob(own.size(), "all_gather", rank_);
        const int bytes = static_cast<int>(own.size());
        std::vector<int> counts(static_cast<std::size_t>(size_)), offsets(counts.size());
        check(MPI_Allgather(&bytes, 1, MPI_INT, counts.data(), 1, MPI_INT, comm_), "MPI_Allgather");
        std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), 0);
        Blob together(static_cast<std::size_t>(offsets.back()) + static_cast<std::size_t>(counts.back()));
        check(MPI_Allgatherv(own.data(), bytes, MPI_BYTE, together.data(), counts.data(), offsets.data(), MPI_BYTE, comm_),
              "MPI_Allgatherv");
        std::vector<Blob> all;
        for (std::size_t r = 0; r < counts.size(); ++r)
            all.emplace_back(together.begin() + offsets[r], together.begin() + offsets[r] + counts[r]);
        return all;
    }

private:
    void check(int code, const char* function) const {
        if (code != MPI_SUCCESS)
            throw Error(Errc::peer_failed,
                        std::string("rendezvous of rank ") + std::to_string(rank_) + ": " + function +
                            " failed; look at MPI's own output",
                        {.operation = "rendezvous", .rank = rank_});
    }

    MPI_Comm comm_;
    int rank_ = 0, size_ = 1;
};

static_assert(Rendezvous<MpiRendezvous>);

}  // namespace gradsync::inline v0
