// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../../bootstrap/mesh.hpp"
#include "../../bootstrap/rendezvous.hpp"
#include "../../core/clock.hpp"
#include "../../core/error.hpp"
#include "../connect.hpp"
#include "../placement.hpp"
#include "message_engine.hpp"
#include "tcp_transport.hpp"

namespace gradsync::inline v0_2::detail {

/// Makes TCP connections between ranks that meet at a rendezvous. Collective.
template <Rendezvous R>
std::unique_ptr<message_passing::TcpTransport> make_tcp_transport(R& rendezvous, std::chrono::nanoseconds timeout) {
    return std::make_unique<message_passing::TcpTransport>(
        bootstrap::connect_mesh(rendezvous, std::min<std::chrono::nanoseconds>(timeout, std::chrono::seconds(30))), rendezvous.rank());
}

/// Makes an engine that uses messages only, for ranks that meet at a rendezvous. Collective. Throws Error(invalid_argument) if `timeout` is
/// not positive.
template <Rendezvous R>
std::shared_ptr<message_passing::MessageEngine> make_tcp_engine(R& rendezvous, std::chrono::nanoseconds timeout) {
    using namespace message_passing;
    check_limit(timeout);
    const Placement ranks(rendezvous, -1);
    auto world = MessageWorld::make(make_tcp_transport(rendezvous, timeout), ranks.processes, ranks.size_here());
    return std::make_shared<MessageEngine>(std::move(world), ranks.all(), ranks.rank, 0, std::make_shared<KnownMemory>(), timeout);
}

}  // namespace gradsync::inline v0_2::detail
