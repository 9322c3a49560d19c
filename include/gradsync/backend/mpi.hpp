// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "../bootstrap/mpi_rendezvous.hpp"
#include "../collective/connect.hpp"
#include "../collective/messages/lifeline.hpp"
#include "../collective/messages/message_world.hpp"
#include "../collective/messages/mpi_transport.hpp"
#include "../collective/placement.hpp"
#include "../collective/process_backend.hpp"
#include "../core/backend.hpp"
#include "../core/clock.hpp"
#include "../core/error.hpp"

namespace gradsync::inline v0_2 {

using MpiOptions = ProcessOptions;

/// The use that an `MpiBackend` makes of the communicator that it is given, like Boost.MPI's `comm_create_kind`. The same on all ranks.
enum class MpiCommunicator : std::uint8_t {
    duplicate,  ///< messages travel in a duplicate; yours stays yours, and you may free it afterwards. (Construction sends in yours with its
                ///< largest tag, MPI_TAG_UB, if ranks are missing.)
    attach,     ///< messages travel in yours: nothing else may ever send in it, no other backend either. It must live until MPI is
                ///< finalised. Errors in it are returned meanwhile (MPI_ERRORS_RETURN)
    take_ownership,  ///< as `attach`, but the backend owns it. It frees it at construction if no messages are needed; otherwise when the
                     ///< last handle is gone and another backend is made or goes later (never if its ranks have failed). If construction
                     ///< throws, do not use it again
};

/// Ranks are the processes of an MPI communicator.
///
/// - **On one machine** ranks share memory. MPI only serves to find one another at construction; no later call uses MPI, so any thread
///   level will do. Collectives work in place on buffers from `allocate`, such as the Reducer's buckets; others are copied through a
///   staging area.
/// - **On several machines**, or if ranks cannot share memory (`describe()` says why), they send messages in a communicator of their own
///   (`MpiCommunicator`). MPI moves messages only inside calls of `progress()`, `test()` and `wait()`. It must have been initialised for
///   the threads that call these (MPI_THREAD_MULTIPLE: all).
/// - **On several machines with several ranks on some**, an all-reduce reduces on each machine, then between machines, so that little
///   crosses the network.
/// - Sums use the kernel of ThreadBackend, in rank order: the bits are the same, for every bucket and overlap policy. In the case just
///   named, sums are in rank order on each machine and then in the machines' order: the bits are the same for every run and policy, but
///   differ from ThreadBackend's, and types of 16 and 8 bits are rounded twice. `MpiOptions::reproducible` sends messages between all ranks
///   instead; the traffic grows by a factor of the ranks per machine.
/// - If a rank fails, leaves early, dies or reaches its time limit, every other rank's wait throws an Error that names it. From then on
///   every call on any communicator of the same origin throws the same Error. A TCP connection between neighbours shows that a process on
///   another machine has died; without one, the time limit does. If the survivors are to go on, keep the launcher from ending them too
///   (Open MPI: `mpirun --enable-recovery`).
/// - This class neither initialises nor finalises MPI; handles may outlive it.
class MpiBackend : public detail::ProcessBackend<MpiBackend> {
public:
    /// Makes a backend of the ranks of `comm` (a `boost::mpi::communicator` converts to one). Collective over `comm`. Throws
    /// Error(invalid_argument) if MPI is not initialised; for MPI_COMM_NULL; if another backend has attached to `comm` or taken it before;
    /// and for ownership of MPI_COMM_WORLD or MPI_COMM_SELF. Throws Error(timeout) if not all ranks come (see `MpiRendezvous`), and
    /// Error(parameter_mismatch) on every rank if their options differ.
    explicit MpiBackend(MPI_Comm comm, MpiOptions options = {}, MpiCommunicator communicator = MpiCommunicator::duplicate) {
        MpiRendezvous meeting(comm, {.timeout = detail::is_limit(options.timeout) ? options.timeout : MpiRendezvousOptions().timeout});
        check_options(meeting, comm, options, communicator);
        if (communicator != MpiCommunicator::duplicate) refuse_second(comm);
        const detail::Placement ranks(meeting, options.domain);
        bool sends = false;
        const auto transport = [&] {
            sends = true;
            const MPI_Comm own = communicator == MpiCommunicator::duplicate ? meeting.duplicate() : comm;
            return std::make_unique<detail::MpiTransport>(own, communicator != MpiCommunicator::attach, ranks.one_machine);
        };
        connection_ = detail::connect(meeting, ranks, options, transport, [&](auto& world) { return watch(world, meeting, ranks); });
        int level = MPI_THREAD_SINGLE;
        MPI_Query_thread(&level);
        connection_.paths.any_thread = level == MPI_THREAD_MULTIPLE;
        if (communicator == MpiCommunicator::take_ownership && !sends) {
            const std::lock_guard lock(bootstrap::mpi_mutex());
            MPI_Comm_free(&comm);
        }
    }

private:
    friend ProcessBackend;
    explicit MpiBackend(detail::Connection connection) noexcept : ProcessBackend(std::move(connection)) {}

    static void check_options(MpiRendezvous& meeting, MPI_Comm comm, const MpiOptions& options, MpiCommunicator communicator) {
        const bool takes_mpis_own = communicator == MpiCommunicator::take_ownership && (comm == MPI_COMM_WORLD || comm == MPI_COMM_SELF);
        const auto all = detail::exchange_options(meeting, options, static_cast<int>(communicator) * 2 + takes_mpis_own);
        if (takes_mpis_own)
            throw Error(
                Errc::invalid_argument,
                "MpiBackend: MPI_COMM_WORLD and MPI_COMM_SELF are not to be freed, so they cannot be taken; let the backend attach or duplicate");
        detail::check_same_options(all, meeting.rank(), "MpiBackend", "MpiOptions");
    }

    /// Two backends would take each other's messages for their own, even those left by a backend that has failed.
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

    /// Connects ranks that cannot see one another's processes, so that the network reports a death. Returns the text of `Paths::unwatched`.
    static std::string watch(message_passing::MessageWorld& world, MpiRendezvous& meeting, const detail::Placement& ranks) {
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
};

static_assert(Backend<MpiBackend>);

}  // namespace gradsync::inline v0_2
