// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../collective/connect.hpp"
#include "../collective/messages/mpi_transport.hpp"
#include "../core/backend.hpp"

/// @file
/// MpiBackend: the ranks are processes of an MPI job.

namespace gradsync::inline v0_2 {

using MpiOptions = ProcessOptions;  ///< the options of an MpiBackend

/// How an `MpiBackend` uses the communicator that it is given, like Boost.MPI's `comm_create_kind`.
/// The same on all ranks.
enum class MpiCommunicator : std::uint8_t {
    /// Messages travel in a duplicate; you keep yours, and may free it afterwards. (Construction sends in yours with
    /// its largest tag, MPI_TAG_UB, if ranks are missing.)
    duplicate,
    /// Messages travel in yours: nothing else may ever send in it, no other backend either. It must live until MPI is
    /// finalised. Errors in it are returned meanwhile (MPI_ERRORS_RETURN).
    attach,
    /// As `attach`, but the backend owns it and frees it: at construction if no messages are needed, otherwise when
    /// another backend is made or destroyed after the last handle (never if its ranks have failed). If construction
    /// throws, do not use it again.
    take_ownership,
};

namespace detail {

/// Another library's communicator object, in `MpiBackend`'s terms.
struct AdoptedCommunicator {
    MPI_Comm comm;
    MpiCommunicator use;
    MpiOwner owner;  ///< if messages travel in `comm`: keeps it, and then frees it as that library does
};

/// The first argument of `adopt_communicator(Adoption, object, kind)`, by which its overloads are found in this
/// namespace. They return an AdoptedCommunicator; `interop/boost_mpi.hpp` has those of Boost.MPI.
struct Adoption {};

}  // namespace detail

/// Ranks are the processes of an MPI communicator.
///
/// - **On one machine** ranks share memory. They use MPI only to find one another at construction; no later call uses
///   it, so any thread level is enough. Collectives work in place on buffers from `allocate`, such as the Reducer's
///   buckets; others are copied through a staging area.
/// - **On several machines**, or if ranks cannot share memory (`describe()` says why), they send messages in a
///   communicator of their own (`MpiCommunicator`). MPI moves messages only inside calls of `progress()`, `test()` and
///   `wait()`. It must have been initialised for the threads that call these (MPI_THREAD_MULTIPLE: all).
/// - **On several machines with several ranks on some**, an all-reduce reduces on each machine, then between machines,
///   so that little crosses the network: one sum per machine if ranks are numbered machine by machine, with a power of
///   two on each; otherwise more (see HierarchicalEngine). Types of 16 and 8 bits then travel as f32.
/// - Sums have the bits of ThreadBackend, for every bucket and overlap policy, wherever the ranks run.
/// - If a rank fails, leaves early, dies or reaches its time limit, every other rank's wait throws an Error that names
///   it. From then on every call on any communicator of the same origin throws the same Error. A TCP connection between
///   neighbours shows that a process on another machine has died; without one, the time limit does. For the survivors
///   to go on, keep the launcher from ending them (Open MPI: `mpirun --enable-recovery`).
/// - This class neither initialises nor finalises MPI; handles may outlive it.
class MpiBackend : public detail::ProcessBackend<MpiBackend> {
public:
    /// Makes a backend of the ranks of `comm` (a `boost::mpi::communicator` converts to one). Collective over `comm`.
    /// Throws Error(invalid_argument) if MPI is not initialised; for MPI_COMM_NULL; if another backend has attached to
    /// `comm` or taken it before; and for ownership of MPI_COMM_WORLD or MPI_COMM_SELF. Throws Error(timeout) if not
    /// all ranks come (see `MpiRendezvous`), and Error(parameter_mismatch) on every rank if their options differ.
    explicit MpiBackend(MPI_Comm comm, MpiOptions options = {},
                        MpiCommunicator communicator = MpiCommunicator::duplicate)
        : ProcessBackend(connect({comm, communicator, {}}, options)) {}

    /// The same for a communicator object of another library, which may free its MPI_Comm itself. For a
    /// `boost::mpi::communicator` and a `boost::mpi::comm_create_kind` include `gradsync/interop/boost_mpi.hpp`.
    template <class Communicator, class Kind>
        requires std::is_class_v<Communicator> && std::convertible_to<const Communicator&, MPI_Comm>
    MpiBackend(const Communicator& comm, MpiOptions options, Kind kind)
        : ProcessBackend(connect(adopted(comm, kind), options)) {}

private:
    friend ProcessBackend;
    explicit MpiBackend(detail::Connection connection) noexcept : ProcessBackend(std::move(connection)) {}

    GRADSYNC_SETUP static detail::Connection connect(detail::AdoptedCommunicator given, const MpiOptions& options) {
        const MPI_Comm comm = given.comm;
        MpiRendezvous meeting(comm, {.timeout = collective::limit_or(options.timeout, MpiRendezvousOptions().timeout)});
        check_options(meeting, comm, options, given.use);
        if (given.use != MpiCommunicator::duplicate) refuse_second(comm);
        const detail::Placement ranks(meeting, options.domain);
        bool sends = false;
        const auto owner = [&] {  // not before it is needed: if construction throws, nothing is freed
            return given.use == MpiCommunicator::take_ownership && !given.owner ? detail::mpi_owner(comm)
                                                                                : std::move(given.owner);
        };
        const auto transport = [&] {
            sends = true;
            const MPI_Comm used = given.use == MpiCommunicator::duplicate ? meeting.duplicate() : comm;
            return std::unique_ptr<message_passing::Transport>(
                new detail::MpiTransport(used, used == comm ? owner() : detail::mpi_owner(used), ranks.one_machine));
        };
        detail::Connection connection = detail::connect(meeting, ranks, options, detail::watch_processes, transport);
        int level = MPI_THREAD_SINGLE;
        MPI_Query_thread(&level);
        connection.paths.any_thread = level == MPI_THREAD_MULTIPLE;
        if (!sends) {
            const std::lock_guard lock(bootstrap::mpi_mutex());
            owner().reset();
        }
        return connection;
    }

    template <class Communicator, class Kind>
    static detail::AdoptedCommunicator adopted(const Communicator& comm, Kind kind) {
        constexpr bool known = requires { adopt_communicator(detail::Adoption(), comm, kind); };
        static_assert(known,
                      "MpiBackend: whether this object frees its MPI_Comm is not known here; for a "
                      "boost::mpi::communicator include <gradsync/interop/boost_mpi.hpp>, otherwise pass the MPI_Comm "
                      "and a gradsync::MpiCommunicator");
        if constexpr (known) return adopt_communicator(detail::Adoption(), comm, kind);
        else return {MPI_COMM_NULL, {}, {}};
    }

    [[gnu::cold]] static void check_options(MpiRendezvous& meeting, MPI_Comm comm, const MpiOptions& options,
                                            MpiCommunicator communicator) {
        const bool takes_mpis_own =
            communicator == MpiCommunicator::take_ownership && (comm == MPI_COMM_WORLD || comm == MPI_COMM_SELF);
        detail::compare_options(
            meeting, options, "MpiBackend", "MpiOptions", static_cast<int>(communicator) * 2 + takes_mpis_own,
            takes_mpis_own
                ? "MpiBackend: MPI_COMM_WORLD and MPI_COMM_SELF are not to be freed, so they cannot be taken; "
                  "let the backend attach or duplicate"
                : nullptr);
    }

    /// Two backends would take each other's messages for their own, even those left by a backend that has failed.
    [[gnu::cold]] static void refuse_second(MPI_Comm comm) {
        const std::lock_guard lock(bootstrap::mpi_mutex());
        static const int mark = bootstrap::make_key(MPI_COMM_NULL_DELETE_FN);
        void* value = nullptr;
        int found = 0;
        MPI_Comm_get_attr(comm, mark, &value, &found);
        if (found)
            detail::raise(Errc::invalid_argument, "MpiBackend: another backend had this communicator before, ",
                          "and its messages may still come; let this one duplicate it");
        MPI_Comm_set_attr(comm, mark, nullptr);
    }
};

static_assert(Backend<MpiBackend>);

}  // namespace gradsync::inline v0_2
