// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string>
#include <utility>

#include "../bootstrap/job.hpp"
#include "../bootstrap/rendezvous.hpp"
#include "../bootstrap/tcp_rendezvous.hpp"
#include "../collective/connect.hpp"
#include "../collective/messages/tcp_engine.hpp"
#include "../collective/placement.hpp"
#include "../collective/process_backend.hpp"
#include "../core/backend.hpp"
#include "../core/clock.hpp"

namespace gradsync::inline v0_2 {

using TcpOptions = ProcessOptions;

/// Ranks that are processes, started by whatever tells them their numbers: nothing but sockets is needed, no MPI.
///
/// - **On one machine** they share memory, as those of MpiBackend do, at its speed; sockets serve to find one another.
/// - **On several machines**, or where they cannot share memory (`describe()` says why), they send messages, over connections of TCP
///   between all of them. Messages move only inside `progress()`, `test()` and `wait()`, which any thread may call: between machines
///   `OverlapBackward` has one that does.
/// - **On several machines with several ranks on some**, an all-reduce does both.
/// - Sums are made by the kernel of ThreadBackend, in rank order: the bits are the same, for every bucket and overlap policy. In the case
///   just named they are others, unless `TcpOptions::reproducible` is set; see MpiBackend.
/// - If a rank fails, leaves early, dies or reaches its time limit, every other rank's wait throws an Error that names it. A
///   death shows at once, on other machines too: its system closes the connections.
class TcpBackend : public detail::ProcessBackend<TcpBackend> {
public:
    /// The ranks that meet at `rendezvous`, which may go afterwards. Collective. Throws Error(parameter_mismatch) on every rank where their
    /// options differ.
    template <Rendezvous R>
    explicit TcpBackend(R& rendezvous, TcpOptions options = {}) : ProcessBackend(connect(rendezvous, options)) {}

    /// The ranks of the job that the environment tells of; see `Job::from_environment`. Collective.
    static TcpBackend from_environment(TcpOptions options = {}) {
        TcpRendezvous rendezvous(Job::from_environment(),
                                 {.timeout = detail::is_limit(options.timeout) ? options.timeout : TcpRendezvousOptions().timeout});
        return TcpBackend(rendezvous, options);
    }

private:
    friend ProcessBackend;
    friend class NcclBackend;
    explicit TcpBackend(detail::Connection connection) noexcept : ProcessBackend(std::move(connection)) {}

    template <Rendezvous R>
    static detail::Connection connect(R& rendezvous, const TcpOptions& options) {
        detail::check_same_options(detail::exchange_options(rendezvous, options), rendezvous.rank(), "TcpBackend", "TcpOptions");
        detail::Connection connection = detail::connect(
            rendezvous, detail::Placement(rendezvous, options.domain), options,
            [&] { return detail::make_tcp_transport(rendezvous, options.timeout); }, [](auto&) { return std::string(); });
        connection.paths.messages = "messages over TCP";
        return connection;
    }
};

static_assert(Backend<TcpBackend>);

}  // namespace gradsync::inline v0_2
