// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>

#include <gradsync/bootstrap/socket.hpp>

namespace gradsync_test {

/// A port of this machine that nobody listened at a moment ago.
inline std::uint16_t free_port() {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return gradsync::net::port_of(gradsync::net::listen(reinterpret_cast<const sockaddr*>(&name), sizeof name, 1));
}

}  // namespace gradsync_test
