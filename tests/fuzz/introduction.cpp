// SPDX-License-Identifier: BSL-1.0
// A rank calls something that answers with the bytes of the input, and hangs up.
#include <gradsync/bootstrap/reception.hpp>

#include "fuzz.hpp"

static const gradsync_fuzz::Target target("introduction", [](gradsync_fuzz::Input input) {
    namespace net = gradsync::net;
    int ends[2];
    gradsync_fuzz::check(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0, "no sockets");
    net::Socket caller(ends[0]);
    const net::Socket called(ends[1]);
    (void)!::send(called.get(), input.data(), input.size(), MSG_NOSIGNAL);
    ::shutdown(called.get(), SHUT_WR);
    const net::Answer answer = net::introduce(std::move(caller), {.size = 2, .from = 1}, {}, net::Clock::now() + std::chrono::seconds(5));
    gradsync_fuzz::check(!answer.channel, "a stranger has proved that it knows the key");
    gradsync_fuzz::check(!answer.problem.empty() || !answer.refusal.why.empty(), "a call ended without a word");
});
