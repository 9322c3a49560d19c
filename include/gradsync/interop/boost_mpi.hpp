// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../backend/mpi.hpp"  // before anything else that includes mpi.h: without its C++ bindings

#include <boost/mpi/communicator.hpp>
#include <boost/mpi/environment.hpp>
#include <boost/mpi/exception.hpp>

/// @file
/// `MpiBackend` for programs that use Boost.MPI:
///
///     boost::mpi::environment environment(argc, argv, boost::mpi::threading::multiple, false);
///     boost::mpi::communicator world;
///     gradsync::MpiBackend comm(world, {.timeout = std::chrono::minutes(2)}, boost::mpi::comm_duplicate);
///
/// - **The environment** finalises MPI when it is destroyed. Pass false as its last argument, `abort_on_exception`, so
///   that the other ranks learn of an exception before this process ends. MPI_Finalize would wait for ranks that are
///   gone, so declare the environment outside of the `try` block, and leave the handler with `std::_Exit`.
/// - **The kind**: with `comm_duplicate`, the default, messages travel in a duplicate, and you may destroy yours. With
///   `comm_attach` and `comm_take_ownership` they travel in yours, and nothing else may send in it. The backend then
///   holds a copy of your object, so the communicator lives as long as either, and Boost.MPI frees it if it would have
///   done so without the backend. `comm_take_ownership` refuses MPI_COMM_WORLD and MPI_COMM_SELF.
namespace gradsync::inline v0_2 {

namespace detail {

/// Adopts an object that frees its communicator with its last copy.
inline AdoptedCommunicator adopt_communicator(Adoption, const boost::mpi::communicator& comm, MpiCommunicator kind) {
    MpiOwner owner;
    if (kind != MpiCommunicator::duplicate) owner = Shared<boost::mpi::communicator>::make(comm);
    return {comm, kind, std::move(owner)};
}

inline AdoptedCommunicator adopt_communicator(Adoption tag, const boost::mpi::communicator& comm,
                                              boost::mpi::comm_create_kind kind) {
    switch (kind) {
        case boost::mpi::comm_duplicate: return adopt_communicator(tag, comm, MpiCommunicator::duplicate);
        case boost::mpi::comm_attach: return adopt_communicator(tag, comm, MpiCommunicator::attach);
        case boost::mpi::comm_take_ownership: return adopt_communicator(tag, comm, MpiCommunicator::take_ownership);
    }
    raise(Errc::invalid_argument, "MpiBackend: unknown boost::mpi::comm_create_kind; use comm_duplicate");
}

}  // namespace detail

/// Returns `f()`. Turns a `boost::mpi::exception` into an Error with MPI's text, the rank in MPI_COMM_WORLD, and what
/// to do; its `operation` is the MPI function. (Boost.MPI's templates throw only if compiled with NDEBUG; otherwise
/// they fail an assertion.)
template <class F>
decltype(auto) with_typed_errors(F&& f) {
    try {
        return std::forward<F>(f)();
    } catch (const boost::mpi::exception& error) {
        const bootstrap::MpiFailure failure = bootstrap::mpi_failure(error.result_code());
        int rank = -1;
        if (boost::mpi::environment::initialized() && !boost::mpi::environment::finalized())
            MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        const std::string who = rank < 0 ? "" : detail::text("rank ", rank, ": ");
        detail::raise(failure.errc, {.operation = error.routine(), .rank = rank}, who, error.what(), "; ",
                      failure.remedy);
    }
}

}  // namespace gradsync::inline v0_2
