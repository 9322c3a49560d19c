// SPDX-License-Identifier: BSL-1.0
#pragma once

// Only the C interface: the C++ bindings were removed from the standard, and cost 0.4 s of compile time.
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX
#endif
#include <mpi.h>

#include <sched.h>
#include <climits>
#include <memory>

#include "../core/math.hpp"
#include "../core/shared.hpp"
#include "rendezvous.hpp"

namespace gradsync::inline v0_2 {

namespace bootstrap {

/// Serialises the library's MPI calls, because MPI may allow one thread at a time only (MPI_THREAD_SERIALIZED). The
/// program must serialise its own.
inline std::mutex& mpi_mutex() noexcept {
    static std::mutex only;
    return only;
}

/// Returns why the calling thread may not call MPI, which was initialised for `level`; null if it may.
inline const char* refusal_of_thread(int level) noexcept {
    if (level >= MPI_THREAD_SERIALIZED) return nullptr;
    int is_main = 0;
    MPI_Is_thread_main(&is_main);
    return is_main
               ? nullptr
               : "MPI was initialised for the main thread alone; ask MPI_Init_thread (or boost::mpi::environment) for "
                 "MPI_THREAD_MULTIPLE, or communicate from the main thread only";
}

/// MPI's text for a failed function.
[[gnu::cold]] inline std::string mpi_text(const char* function, int code) {
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    MPI_Error_string(code, text, &length);
    return detail::text(function, ": ", text);
}

/// The library's error code for a failure that MPI reports, and what to do about it.
struct MpiFailure {
    Errc errc;
    const char* remedy;
};
[[gnu::cold]] inline MpiFailure mpi_failure(int code) noexcept {
    int error_class = MPI_ERR_OTHER;
    MPI_Error_class(code, &error_class);
    if (error_class == MPI_ERR_COMM)
        return {Errc::invalid_argument,
                "this rank is in no such communicator (MPI_COMM_NULL), or it was freed; pass one that the rank is in, "
                "and free it later"};
    if (error_class == MPI_ERR_TRUNCATE)
        return {Errc::collective_mismatch,
                "a message was longer than its receiver expected; give all ranks the same calls and sizes"};
    for (const int argument : {MPI_ERR_ARG, MPI_ERR_BUFFER, MPI_ERR_COUNT, MPI_ERR_GROUP, MPI_ERR_OP, MPI_ERR_RANK,
                               MPI_ERR_REQUEST, MPI_ERR_ROOT, MPI_ERR_TAG, MPI_ERR_TYPE})
        if (error_class == argument) return {Errc::invalid_argument, "correct this argument of the call"};
    return {Errc::peer_failed, "look at MPI's own output"};
}

/// The largest tag. The library uses it in communicators that it is given, while backends are constructed.
inline int liveness_tag() noexcept {
    void* bound = nullptr;
    int found = 0;
    // Asks MPI_COMM_WORLD: Open MPI copies the attribute to duplicates of that one only.
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &bound, &found);
    return found ? *static_cast<int*>(bound) : 32767;  // the minimum that the standard guarantees
}

/// A new key for an attribute of communicators. `on_delete` is called when an attribute is deleted.
inline int make_key(MPI_Comm_delete_attr_function* on_delete) noexcept {
    int key = MPI_KEYVAL_INVALID;
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, on_delete, &key, nullptr);
    return key;
}

/// The number of the last call over all rendezvous of a communicator; the same on all ranks. It tells the messages of
/// this rendezvous from those of an earlier one that are still in flight.
[[gnu::cold]] inline detail::Shared<int> last_call_of(MPI_Comm comm) {
    using Holder = detail::Shared<int>;
    static const int key = make_key([](MPI_Comm, int, void* holder, void*) -> int {
        delete static_cast<Holder*>(holder);
        return MPI_SUCCESS;
    });
    void* holder = nullptr;
    int found = 0;
    MPI_Comm_get_attr(comm, key, &holder, &found);
    if (found) return *static_cast<Holder*>(holder);
    auto made = std::make_unique<Holder>(detail::Shared<int>::make(0));
    if (MPI_Comm_set_attr(comm, key, made.get()) != MPI_SUCCESS) return *made;
    return *made.release();
}

/// Writes the offset of each rank's bytes among all, as far as an int can hold it, and returns the total.
[[gnu::cold]] inline std::int64_t add_up(const List<int>& counts, List<int>& offsets) noexcept {
    std::int64_t bytes = 0;
    for (std::size_t r = 0; r < counts.size(); ++r) {
        offsets[r] = static_cast<int>(detail::smaller<std::int64_t>(bytes, INT_MAX));
        bytes += counts[r];
    }
    return bytes;
}

/// While it lives, errors in a communicator are returned, whatever its error handler: MPI's default ends the process.
class MpiErrorsReturned {
public:
    explicit MpiErrorsReturned(MPI_Comm comm) noexcept : comm_(comm) {
        MPI_Comm_get_errhandler(comm_, &before_);
        MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    }
    MpiErrorsReturned& operator=(MpiErrorsReturned&&) = delete;
    ~MpiErrorsReturned() {
        MPI_Comm_set_errhandler(comm_, before_);
        MPI_Errhandler_free(&before_);
    }

private:
    MPI_Comm comm_;
    MPI_Errhandler before_ = MPI_ERRHANDLER_NULL;
};

}  // namespace bootstrap

/// Options of MpiRendezvous; each rank has its own.
struct MpiRendezvousOptions {
    std::chrono::nanoseconds timeout = std::chrono::minutes(5);  ///< limit of each MPI call; an exchange makes two
};

/// A rendezvous of ranks that already have MPI. The communicator stays yours, and must outlive this.
///
/// No MPI call blocks here. After a time-out, MPI keeps its buffers until the process ends, and the communicator must
/// not be used for other collectives (after a time-out of `duplicate`, it may not even give a new one). MPI_Finalize
/// may then hang; MPI_Abort does not.
///
/// The error names the ranks that did not come, which MPI itself does not report. A rank that has waited for too long
/// tells all others which call it is in, and waiting ranks answer with theirs. These messages use the communicator's
/// largest tag, which the library reserves. Nothing is sent unless a rank asks.
class MpiRendezvous {
public:
    /// Throws Error(invalid_argument) if MPI is not initialised, is finalised or does not allow this thread; for
    /// MPI_COMM_NULL; and for an intercommunicator.
    GRADSYNC_SETUP explicit MpiRendezvous(MPI_Comm comm, MpiRendezvousOptions options = {})
        : comm_(comm), options_(options) {
        int initialised = 0, finalised = 0;
        MPI_Initialized(&initialised);
        MPI_Finalized(&finalised);
        if (finalised)
            refuse(Errc::invalid_argument, {}, "MPI is finalised already; make the backend, or the rendezvous, before");
        if (!initialised)
            refuse(Errc::invalid_argument, {},
                   "MPI is not initialised; make a boost::mpi::environment, or call MPI_Init, first");
        int level = MPI_THREAD_SINGLE;
        MPI_Query_thread(&level);
        if (const char* const refusal = bootstrap::refusal_of_thread(level))
            refuse(Errc::invalid_argument, {}, refusal);
        if (options_.timeout <= std::chrono::nanoseconds::zero())
            refuse(Errc::invalid_argument, {}, "the time limit must be positive");
        options_.timeout = detail::clamp_timeout(options_.timeout);
        if (comm_ == MPI_COMM_NULL)  // MPI itself would end the process
            refuse(Errc::invalid_argument, {}, "MPI_COMM_NULL has no ranks; make no backend or rendezvous on a ",
                   "rank that is in no communicator (MPI_Comm_split with MPI_UNDEFINED)");
        const std::lock_guard lock(bootstrap::mpi_mutex());
        const bootstrap::MpiErrorsReturned returned(comm_);
        int two_groups = 0;
        check(MPI_Comm_test_inter(comm_, &two_groups), "MPI_Comm_test_inter");
        if (two_groups)
            refuse(Errc::invalid_argument, {},
                   "an intercommunicator has two groups of ranks; make one of them first (MPI_Intercomm_merge)");
        check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
        check(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
        tag_ = bootstrap::liveness_tag();
        last_call_ = bootstrap::last_call_of(comm_);
        earlier_ = *last_call_;
        heard_.resize(static_cast<std::size_t>(size_));
        told_.resize(heard_.size());
    }

    int rank() const noexcept { return rank_; }  ///< Returns this rank.
    int size() const noexcept { return size_; }  ///< Returns the number of ranks.

    /// See the concept `Rendezvous`.
    GRADSYNC_SETUP std::vector<Blob> all_gather(std::span<const std::byte> own) {
        bootstrap::check_blob(own.size(), "all_gather", rank_);
        struct Buffers {
            Blob own, together;
            int bytes = 0;
            List<int> counts, offsets;
        };
        const auto buffers = detail::Shared<Buffers>::make();
        Buffers& b = *buffers;
        b.own.assign(own.begin(), own.end());
        b.bytes = static_cast<int>(own.size());
        b.counts.resize(static_cast<std::size_t>(size_));
        b.offsets.resize(b.counts.size());
        finish(buffers, "MPI_Iallgather", [&](Buffers&, MPI_Request* request) {
            return MPI_Iallgather(&b.bytes, 1, MPI_INT, b.counts.data(), 1, MPI_INT, comm_, request);
        });
        const std::int64_t bytes = bootstrap::add_up(b.counts, b.offsets);
        if (bytes > INT_MAX)
            refuse(Errc::invalid_argument, {}, "the ranks exchange ", bytes, " bytes in total, but MPI takes at most ",
                   INT_MAX, "; exchange less, and use a backend's collectives for data");
        b.together.resize(static_cast<std::size_t>(bytes));
        finish(buffers, "MPI_Iallgatherv", [&](Buffers&, MPI_Request* request) {
            return MPI_Iallgatherv(b.own.data(), b.bytes, MPI_BYTE, b.together.data(), b.counts.data(),
                                   b.offsets.data(), MPI_BYTE, comm_, request);
        });
        std::vector<Blob> all;
        for (std::size_t r = 0; r < b.counts.size(); ++r)
            all.emplace_back(b.together.begin() + b.offsets[r], b.together.begin() + b.offsets[r] + b.counts[r]);
        return all;
    }

    /// Returns another communicator of the same ranks, which the caller must free. Collective.
    GRADSYNC_SETUP MPI_Comm duplicate() {
        const auto copy = detail::Shared<MPI_Comm>::make(MPI_COMM_NULL);
        finish(copy, "MPI_Comm_idup",
               [&](MPI_Comm& c, MPI_Request* request) { return MPI_Comm_idup(comm_, &c, request); });
        return *copy;
    }

private:
    /// Begins an MPI call and returns when it is complete. `memory`: the buffers that MPI uses meanwhile.
    template <class Memory, class Begin>
    [[gnu::cold]] void finish(const detail::Shared<Memory>& memory, const char* function, Begin&& begin) {
        using Clock = std::chrono::steady_clock;
        MPI_Request request = MPI_REQUEST_NULL;
        const auto begun = Clock::now();
        // Time for the others to answer, as `collective::Deadline` allows at a time limit.
        const auto respite = detail::larger<Clock::duration>(options_.timeout / 20, std::chrono::milliseconds(250));
        call_ = ++*last_call_;
        asked_ = false;
        for (bool first = true;; first = false) {
            const auto spent = Clock::now() - begun;
            {
                const std::lock_guard lock(bootstrap::mpi_mutex());
                const bootstrap::MpiErrorsReturned returned(comm_);
                if (first) check(begin(*memory, &request), function);
                int over = 0;
                check(MPI_Test(&request, &over, MPI_STATUS_IGNORE), function);
                if (over) return;
                if (spent > std::chrono::milliseconds(1)) hear();
                if (spent >= options_.timeout && !std::exchange(asked_, true))
                    for (int r = 0; r < size_; ++r)
                        if (r != rank_) tell(r);
            }
            // If several ranks are silent, some of them may only be slow to answer.
            if (spent >= options_.timeout + respite && (silent().size() < 2 || spent >= options_.timeout + 4 * respite))
                break;
            if (spent < std::chrono::milliseconds(1)) ::sched_yield();
            else ::usleep(50);
        }
        detail::leak_until_exit(memory);
        // If all ranks answered, the missing ones gave up earlier, or are elsewhere in the program.
        using bootstrap::text;
        const List<int> missing = silent();
        const std::string ranks =
            missing.empty() ? text("the ", size_, " ranks of its communicator") : bootstrap::list_ranks(missing);
        refuse(Errc::timeout, {.peer = missing.empty() ? -1 : missing.front()}, "waited ",
               bootstrap::format_duration(options_.timeout), " in ", function, " for ", ranks,
               "; every rank has to make its backend, or rendezvous, at the same place in the program");
    }

    /// The ranks that are not known to have reached this call.
    [[gnu::cold]] List<int> silent() const {
        List<int> ranks;
        for (int r = 0; r < size_; ++r)
            if (r != rank_ && heard_[r] < call_) ranks.push_back(r);
        return ranks;
    }

    /// Receives the calls that other ranks are in, and answers them.
    [[gnu::cold]] void hear() {
        for (;;) {
            int there = 0, call = 0;
            MPI_Status status;
            if (MPI_Iprobe(MPI_ANY_SOURCE, tag_, comm_, &there, &status) != MPI_SUCCESS || !there) return;
            if (MPI_Recv(&call, 1, MPI_INT, status.MPI_SOURCE, tag_, comm_, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
            // A rank that answers is alive, even if it is in an earlier call: it may wait for the same missing rank.
            // Unreceived questions of an earlier rendezvous carry no information.
            int& heard = heard_[status.MPI_SOURCE];
            if (call > earlier_) heard = detail::larger(heard, asked_ ? call_ : call);
            tell(status.MPI_SOURCE);
        }
    }

    /// Tells a rank which call this one is in, at most once per call.
    [[gnu::cold]] void tell(int rank) {
        if (std::exchange(told_[rank], call_) == call_) return;
        const auto message = detail::Shared<int>::make(call_);
        MPI_Request request = MPI_REQUEST_NULL;
        if (MPI_Isend(message.get(), 1, MPI_INT, rank, tag_, comm_, &request) == MPI_SUCCESS)
            MPI_Request_free(&request);
        detail::leak_until_exit(message);  // its receiver may never take it
    }

    void check(int code, const char* function) const {
        if (code == MPI_SUCCESS) return;
        const bootstrap::MpiFailure failure = bootstrap::mpi_failure(code);
        refuse(failure.errc, {}, bootstrap::mpi_text(function, code), "; ", failure.remedy);
    }

    [[noreturn]] void refuse(Errc code, const bootstrap::ErrorPlace& place, const auto&... parts) const {
        bootstrap::raise(code, {.operation = "rendezvous", .rank = rank_, .peer = place.peer},
                         rank_ < 0 ? "rendezvous over MPI: " : bootstrap::text("rendezvous of rank ", rank_, ": "),
                         parts...);
    }

    MPI_Comm comm_;
    MpiRendezvousOptions options_;
    int rank_ = -1, size_ = 0;  ///< set by the constructor
    int tag_ = 0;               ///< tag of the messages about calls
    detail::Shared<int> last_call_;
    int earlier_ = 0;  ///< last call of the previous rendezvous
    int call_ = 0;     ///< number of the current call
    bool asked_ = false;
    List<int> heard_;  ///< by rank: last call that the rank is known to have reached
    List<int> told_;   ///< by rank: last call that this rank has told it
};

static_assert(Rendezvous<MpiRendezvous>);

}  // namespace gradsync::inline v0_2
