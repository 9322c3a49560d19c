// SPDX-License-Identifier: BSL-1.0
#include <gradsync/bootstrap/tcp_rendezvous.hpp>

#include "conformance/rendezvous.hpp"
#include "support/ports.hpp"

namespace {

template <int family>
struct TcpMeeting {
    int size;
    std::uint16_t port = gradsync_test::free_port();

    explicit TcpMeeting(int size_) : size(size_) {}
    gradsync::TcpRendezvous join(int rank, std::chrono::nanoseconds limit) const {
        return gradsync::TcpRendezvous(
            {.rank = rank, .size = size, .address = family == AF_INET6 ? "::1" : "localhost", .port = port, .token = "a job"},
            {.timeout = limit});
    }
};

bool has_ipv6() {
    sockaddr_in6 name{};
    name.sin6_family = AF_INET6;
    name.sin6_addr = in6addr_loopback;
    return static_cast<bool>(gradsync::net::listen({reinterpret_cast<const sockaddr*>(&name), sizeof name}, 1));
}

}  // namespace

TEST_CASE("TcpRendezvous is a rendezvous") { gradsync_test::check_rendezvous<TcpMeeting<AF_INET>>(); }
TEST_CASE("TcpRendezvous over IPv6 is a rendezvous" * doctest::skip(!has_ipv6())) {
    gradsync_test::check_rendezvous<TcpMeeting<AF_INET6>>();
}
