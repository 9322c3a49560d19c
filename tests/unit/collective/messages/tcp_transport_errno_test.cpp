// SPDX-License-Identifier: BSL-1.0
// ctest: ALONE NOT_WITH thread
// Calls of the system that fail for a moment are no deaths: sendmsg() and recv() are this program's own.
#include <gradsync/collective/messages/tcp_transport.hpp>

#include <doctest/doctest.h>

#include <sys/syscall.h>

#include <chrono>
#include <cstddef>
#include <vector>

namespace {

int failure = 0;  ///< errno of every other call, if not 0
bool fails = false;

bool fails_now() {
    fails = failure != 0 && !fails;
    if (fails) errno = failure;
    return fails;
}

}  // namespace

extern "C" ssize_t sendmsg(int socket, const msghdr* message, int flags) {
    return fails_now() ? -1 : ::syscall(SYS_sendmsg, socket, message, flags);
}
extern "C" ssize_t recv(int socket, void* data, std::size_t bytes, int flags) {
    return fails_now() ? -1 : ::syscall(SYS_recvfrom, socket, data, bytes, flags, nullptr, nullptr);
}

using gradsync::message_passing::TcpTransport;
using namespace std::chrono_literals;

TEST_CASE("TcpTransport: an error that passes, in the middle of a message, is no death") {
    for (const int error : {EINTR, ENOBUFS, ENOMEM}) {
        CAPTURE(error);
        int ends[2] = {-1, -1};
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
        gradsync::List<gradsync::net::Socket> zeros(2), ones(2);
        zeros[1] = gradsync::net::Socket(ends[0]);
        ones[0] = gradsync::net::Socket(ends[1]);
        TcpTransport zero(std::move(zeros), 0), one(std::move(ones), 1);
        const std::vector<std::byte> sent(1'000'000, std::byte{7});
        std::vector<std::byte> got(sent.size());
        failure = error;
        auto in = one.receive(0, 3, got.data(), got.size()), out = zero.send(1, 3, sent.data(), sent.size());
        const auto until = std::chrono::steady_clock::now() + 30s;
        while (!(zero.finish_one(out) && one.finish_one(in)) && !one.lost(0) && std::chrono::steady_clock::now() < until) {
            zero.poll();
            one.poll();
        }
        failure = 0;
        CHECK(!one.lost(0));
        CHECK(!zero.lost(1));
        CHECK(got == sent);
    }
}
