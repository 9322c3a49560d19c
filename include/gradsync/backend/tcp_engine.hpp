#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "../bootstrap/mesh.hpp"
#include "../bootstrap/rendezvous.hpp"
#include "../collective/process.hpp"
#include "../core/clock.hpp"
#include "../core/error.hpp"
#include "../message_passing/message_engine.hpp"
#include "../message_passing/tcp_transport.hpp"

namespace gradsync::inline v0::detail {

/// An engine of messages over TCP, for ranks that have found one another. Collective.
template <Rendezvous R>
std::shared_ptr<message_passing::MessageEngine> make_tcp_engine(R& rendezvous, std::chrono::nanoseconds timeout) {
    using namespace message_passing;
    if (timeout <= std::chrono::nanoseconds::zero()) throw Error(Errc::invalid_argument, "the time limit of a backend must be positive");
    const auto own = collective::ProcessIdentity::own();
    auto processes = bootstrap::exchange(rendezvous, own);
    auto transport = std::make_unique<TcpTransport>(
        bootstrap::connect_mesh(rendezvous, std::min<std::chrono::nanoseconds>(timeout, std::chrono::seconds(30))), rendezvous.rank());
    const auto here =
        std::count_if(processes.begin(), processes.end(), [&](const auto& process) { return process.machine == own.machine; });
    std::vector<int> ranks;
    for (int r = 0; r < rendezvous.size(); ++r) ranks.push_back(r);
    auto world = MessageWorld::make(std::move(transport), std::move(processes), static_cast<int>(here));
    return std::make_shared<MessageEngine>(std::move(world), std::move(ranks), rendezvous.rank(), 0, std::make_shared<KnownMemory>(),
                                           timeout);
}

}  // namespace gradsync::inline v0::detail
