// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../core/clock.hpp"
#include "../core/error.hpp"
#include "reception.hpp"
#include "rendezvous.hpp"

namespace gradsync::inline v0_2::bootstrap {

/// Connects every rank with every other; element r is the connection to rank r, and this rank's own is empty. Collective. If a connection
/// cannot be made within `limit`, every rank throws the same Error, which names the two ranks.
template <Rendezvous R>
std::vector<net::Socket> connect_mesh(R& rendezvous, std::chrono::nanoseconds limit) {
    const int rank = rendezvous.rank(), size = rendezvous.size();
    const auto at = [](std::int64_t r) { return static_cast<std::size_t>(r); };
    std::vector<net::Socket> sockets(at(size));
    if (size == 1) return sockets;

    const net::Reception reception = net::Reception::open();
    const std::vector<net::Contact> contacts = exchange(rendezvous, reception.contact());
    std::vector<int> below, above;
    for (int r = 0; r < size; ++r)
        if (r != rank) (r < rank ? below : above).push_back(r);
    for (net::Link& link :
         net::connect(reception, contacts, rank, below, above, limit, std::chrono::ceil<std::chrono::milliseconds>(limit)))
        sockets[at(link.rank)] = std::move(link.socket);

    std::int32_t apart = -1;
    for (int r = size; r-- > 0;)
        if (r != rank && !sockets[at(r)]) apart = r;
    const std::vector<std::int32_t> all = exchange(rendezvous, apart);
    for (int r = 0; r < size; ++r)
        if (const int other = all[at(r)]; other >= 0)
            throw Error(Errc::peer_failed,
                        "ranks " + std::to_string(other < r ? other : r) + " and " + std::to_string(other < r ? r : other) +
                            " cannot reach one another over TCP within " + format_duration(limit) +
                            "; look at the firewall and the network between their machines",
                        {.operation = "connect_mesh", .rank = rank, .peer = other == rank ? r : other});
    return sockets;
}

}  // namespace gradsync::inline v0_2::bootstrap
