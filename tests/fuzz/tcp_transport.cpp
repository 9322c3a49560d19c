// SPDX-License-Identifier: BSL-1.0
// Two ranks over a socket pair: the input says what this rank does, and what bytes come from the other one.
#include <sys/socket.h>

#include <list>

#include <gradsync/collective/messages/tcp_transport.hpp>

#include "fuzz.hpp"

using gradsync::message_passing::TcpTransport;

static const gradsync_fuzz::Target target("tcp_transport", [](gradsync_fuzz::Input input) {
    int ends[2];
    gradsync_fuzz::check(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0, "no sockets");
    gradsync::net::Socket peer(ends[1]);
    gradsync::List<gradsync::net::Socket> sockets(2);
    sockets[1] = gradsync::net::Socket(ends[0]);
    std::list<std::string> buffers;
    std::vector<TcpTransport::Ticket> tickets;
    TcpTransport transport(std::move(sockets), 0);
    const auto buffer = [&](std::size_t bytes) { return buffers.emplace_back(bytes, 'x').data(); };
    const auto drop = [&](std::size_t i, bool dropped) {
        if (dropped) tickets.erase(tickets.begin() + static_cast<std::ptrdiff_t>(i));
    };
    while (input.size() != 0) {
        const auto what = input.take<std::uint8_t>();
        const int stream = what >> 3 & 3;
        const std::size_t bytes = input.take<std::uint8_t>(), i = tickets.empty() ? 0 : bytes % tickets.size();
        switch (what & 7) {
            case 0: tickets.push_back(transport.receive(stream == 0 ? TcpTransport::any_rank : 1, stream, buffer(bytes), bytes)); break;
            case 1: tickets.push_back(transport.send(1, stream, buffer(bytes), bytes)); break;
            case 2: transport.poll(); break;
            case 3:
                if (!tickets.empty()) drop(i, transport.finish(tickets[i]));
                break;
            case 4:
                if (!tickets.empty()) drop(i, transport.give_up(tickets[i]));
                break;
            case 5: ::shutdown(peer.get(), stream % 3); break;
            default: const auto sent = input.take_bytes(bytes); (void)!::send(peer.get(), sent.data(), sent.size(), MSG_NOSIGNAL);
        }
    }
    while (transport.poll()) {
    }
});
