// SPDX-License-Identifier: BSL-1.0
// Tickets that are given, looked up and taken back, beside a list of those that are out.
#include <vector>

#include <gradsync/collective/messages/transport.hpp>

#include "fuzz.hpp"

static const gradsync_fuzz::Target target("ticket_book", [](gradsync_fuzz::Input all) {
    auto input = all.take_bytes(200);
    gradsync::message_passing::TicketBook<int> book;
    std::vector<std::pair<gradsync::message_passing::Transport::Ticket, int>> out;
    for (int n = 0; input.size() != 0; ++n) {
        const auto what = input.take<std::uint8_t>();
        if (what % 2 == 0 || out.empty()) {
            const auto ticket = book.add(n);
            for (const auto& other : out) gradsync_fuzz::check(other.first != ticket, "a ticket was given twice");
            out.emplace_back(ticket, n);
        } else {
            book.remove(out[what / 2 % out.size()].first);
            out.erase(out.begin() + static_cast<std::ptrdiff_t>(what / 2 % out.size()));
        }
        for (const auto& [ticket, number] : out) gradsync_fuzz::check(book[ticket] == number, "an entry has changed");
    }
    std::size_t highest = 0;
    for (const auto& [ticket, n] : out) highest = std::max<std::size_t>(highest, ticket);
    gradsync_fuzz::check(highest < 200, "tickets are not reused");
});
