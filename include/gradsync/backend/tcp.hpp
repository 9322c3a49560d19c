// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../bootstrap/tcp_rendezvous.hpp"
#include "../collective/connect.hpp"
#include "../core/backend.hpp"

#ifdef GRADSYNC_ONCE
#include "../collective/messages/tcp_transport.hpp"
#endif

/// @file
/// TcpBackend: the ranks are processes that any launcher has started.

namespace gradsync::inline v0_2 {

using TcpOptions = ProcessOptions;  ///< the options of a TcpBackend

/// Ranks are processes. Any launcher that tells each process its rank can start them. They need only sockets, no MPI.
///
/// - **On one machine** ranks share memory, as those of MpiBackend do, at the same speed.
///   They use sockets only to find one another.
/// - **On several machines**, or if ranks cannot share memory (`describe()` says why), they send messages over TCP
///   connections between all of them. Messages move only inside `progress()`, `test()` and `wait()`, which any thread
///   may call. Between machines, `OverlapBackward` calls them from its own thread.
/// - **On several machines with several ranks on some**, an all-reduce reduces on each machine, then between machines.
/// - Sums have the bits of ThreadBackend, wherever the ranks run; see MpiBackend.
/// - If a rank fails, leaves early, dies or reaches its time limit, every other rank's wait throws
///   an Error that names it. A death shows at once, even on other machines, because the system closes
///   the connections of a process that dies.
class TcpBackend : public detail::ProcessBackend<TcpBackend> {
public:
    /// Makes a backend of the ranks that meet at `rendezvous`, which may be destroyed afterwards. Collective. Throws
    /// Error(parameter_mismatch) on every rank if their options differ.
    template <Rendezvous R>
    explicit TcpBackend(R& rendezvous, TcpOptions options = {}) : ProcessBackend(connect(rendezvous, options)) {}

    /// Makes a backend of the job that the environment describes; see `Job::from_environment`. Collective.
    static TcpBackend from_environment(TcpOptions options = {}) {
        TcpRendezvous rendezvous(
            Job::from_environment(),
            {.timeout = collective::limit_or(options.timeout, TcpRendezvousOptions().timeout), .bind = options.bind});
        return TcpBackend(rendezvous, options);
    }

private:
    friend ProcessBackend;
    friend class NcclBackend;
    explicit TcpBackend(detail::Connection connection) noexcept : ProcessBackend(std::move(connection)) {}

    static detail::Connection connect(bootstrap::AnyRendezvous rendezvous, const TcpOptions& options,
                                      const char* backend = "TcpBackend", const char* name = "TcpOptions");
};

#ifdef GRADSYNC_ONCE
GRADSYNC_ONCE detail::Connection TcpBackend::connect(bootstrap::AnyRendezvous rendezvous, const TcpOptions& options,
                                                     const char* backend, const char* name) {
    detail::compare_options(rendezvous, options, backend, name);
    detail::Connection connection =
        detail::connect(rendezvous, detail::Placement(rendezvous, options.domain), options, nullptr,
                        [&] { return message_passing::make_tcp_transport(rendezvous, options.timeout, options.bind); });
    connection.paths.messages = detail::text("messages over TCP", options.bind.empty() ? "" : " at " + options.bind);
    return connection;
}
#endif

static_assert(Backend<TcpBackend>);

}  // namespace gradsync::inline v0_2

#ifdef GRADSYNC_COMPILED
#include "../compiled_tcp.hpp"
#endif
