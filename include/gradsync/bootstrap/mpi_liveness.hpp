// SPDX-License-Identifier: BSL-1.0
#pragma once

// Only the C interface: the C++ bindings are gone from the standard, and cost 0.4 s of compile time.
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX
#endif
#include <mpi.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "../core/leak_until_exit.hpp"
#include "../core/math.hpp"

namespace gradsync::inline v0_2::bootstrap {

/// The largest tag. The library uses it in the communicators that it is given, while backends are constructed.
inline int liveness_tag() noexcept {
    void* bound = nullptr;
    int found = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &bound, &found);  // other communicators may lack it: Open MPI copies it to duplicates
                                                                    // only
    return found ? *static_cast<int*>(bound) : 32767;               // the minimum that the standard guarantees
}

/// The number of the last call of all liveness checks of a communicator; the same on all ranks. It tells this check's messages from those
/// of an earlier check that are still on their way.
inline std::shared_ptr<int> last_call_of(MPI_Comm comm) {
    using Holder = std::shared_ptr<int>;
    static const int key = [] {
        int made = MPI_KEYVAL_INVALID;
        MPI_Comm_create_keyval(
            MPI_COMM_NULL_COPY_FN,
            [](MPI_Comm, int, void* holder, void*) {
                delete static_cast<Holder*>(holder);
                return static_cast<int>(MPI_SUCCESS);
            },
            &made, nullptr);
        return made;
    }();
    void* holder = nullptr;
    int found = 0;
    MPI_Comm_get_attr(comm, key, &holder, &found);
    if (found) return *static_cast<Holder*>(holder);
    auto made = std::make_unique<Holder>(std::make_shared<int>(0));
    if (MPI_Comm_set_attr(comm, key, made.get()) != MPI_SUCCESS) return *made;
    return *made.release();
}

/// Finds the ranks that are missing if a collective of MPI's does not end, since MPI itself does not say. A rank that has waited for too
/// long tells all others which call it is in; the others that wait answer with theirs. Nothing is sent unless a rank asks. The caller must
/// be allowed to call MPI.
class MpiLivenessCheck {
public:
    MpiLivenessCheck(MPI_Comm comm, int rank, int size)
        : comm_(comm),
          tag_(liveness_tag()),
          rank_(rank),
          last_call_(last_call_of(comm)),
          earlier_(*last_call_),
          heard_(static_cast<std::size_t>(size)),
          told_(heard_.size()) {}

    /// Begins the next call, the same on all ranks.
    void begin() noexcept {
        call_ = ++*last_call_;
        asked_ = false;
    }

    /// Receives what other ranks have told, and answers them.
    void look() {
        for (;;) {
            int there = 0, call = 0;
            MPI_Status status;
            if (MPI_Iprobe(MPI_ANY_SOURCE, tag_, comm_, &there, &status) != MPI_SUCCESS || !there) return;
            if (MPI_Recv(&call, 1, MPI_INT, status.MPI_SOURCE, tag_, comm_, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
            const auto source = static_cast<std::size_t>(status.MPI_SOURCE);
            // A rank that answers is alive, even if it is in an earlier call: it may wait for the same missing rank. Questions of an
            // earlier liveness check that no rank received say nothing.
            if (call > earlier_) heard_[source] = gradsync::detail::larger(heard_[source], asked_ ? call_ : call);
            tell(source);
        }
    }

    void ask() {
        asked_ = true;
        for (std::size_t r = 0; r < heard_.size(); ++r)
            if (static_cast<int>(r) != rank_) tell(r);
    }

    /// Returns the ranks that have not come to this call, as far as this one was told.
    std::vector<int> silent() const {
        std::vector<int> ranks;
        for (std::size_t r = 0; r < heard_.size(); ++r)
            if (static_cast<int>(r) != rank_ && heard_[r] < call_) ranks.push_back(static_cast<int>(r));
        return ranks;
    }

private:
    /// Sends at most once a call.
    void tell(std::size_t rank) {
        if (told_[rank] == call_) return;
        told_[rank] = call_;
        const auto message = std::make_shared<int>(call_);
        MPI_Request request = MPI_REQUEST_NULL;
        if (MPI_Isend(message.get(), 1, MPI_INT, static_cast<int>(rank), tag_, comm_, &request) == MPI_SUCCESS) MPI_Request_free(&request);
        gradsync::detail::leak_until_exit(message);  // its receiver may never take it
    }

    MPI_Comm comm_;
    int tag_, rank_;
    std::shared_ptr<int> last_call_;
    int earlier_;   ///< the last call of the liveness checks before this one
    int call_ = 0;  ///< number of the call under way
    bool asked_ = false;
    std::vector<int> heard_;  ///< by rank: the last call that the rank is known to have reached
    std::vector<int> told_;   ///< by rank: the last call that this rank has told it
};

}  // namespace gradsync::inline v0_2::bootstrap
