// SPDX-License-Identifier: BSL-1.0
// ctest: MPI RANKS 2
// Messages of MPI between two ranks.
#include <gradsync/collective/messages/mpi_transport.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace {

using gradsync::detail::MpiTransport;
using Ticket = MpiTransport::Ticket;
using Bytes = std::vector<unsigned char>;

/// Until the program ends.
struct Environment {
    Environment() { MPI_Init(nullptr, nullptr); }
    ~Environment() { MPI_Finalize(); }
};

std::unique_ptr<MpiTransport> transport() {
    static const Environment only;
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    return std::make_unique<MpiTransport>(comm, gradsync::detail::mpi_owner(comm), true);
}

Bytes numbered(std::size_t bytes, std::size_t salt) {
    Bytes values(bytes);
    for (std::size_t i = 0; i < bytes; ++i) values[i] = static_cast<unsigned char>((i * 7 + i / 251 + salt) % 256);
    return values;
}

void finish(MpiTransport& own, gradsync::List<Ticket> tickets) {
    while (!own.finish_all(tickets)) own.poll();
}

}  // namespace

TEST_CASE("MpiTransport: messages of known length arrive whole and in their order, in as many parts as may be") {
    const auto own = transport();
    const std::lock_guard lock(own->mutex());
    const std::size_t quick = own->quick_bytes();
    REQUIRE(quick < 100'000);  // both ranks are on one machine
    std::vector<std::size_t> sizes;
    for (const std::size_t parts : {1, 2, 4, 5, 6})
        for (const std::size_t more : {0, 1, 2}) sizes.push_back(parts * quick - 1 + more);
    sizes.push_back(0), sizes.push_back(1), sizes.push_back(300'000);

    for (const bool receives_first : {true, false}) {
        CAPTURE(receives_first);
        const int peer = 1 - own->rank();
        std::vector<Bytes> sent, received;
        for (const std::size_t size : sizes) {
            sent.push_back(numbered(size, static_cast<std::size_t>(own->rank()) + size));
            received.emplace_back(size);
        }
        gradsync::List<Ticket> tickets;
        const auto receive = [&] {
            for (Bytes& message : received)
                tickets.push_back(own->receive(peer, 3, message.data(), message.size(), nullptr, message.size()));
        };
        if (receives_first) receive();
        for (const Bytes& message : sent) tickets.push_back(own->send(peer, 3, message.data(), message.size(), true));
        if (!receives_first) receive();
        finish(*own, std::move(tickets));
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            CAPTURE(sizes[i]);
            CHECK(received[i] == numbered(sizes[i], static_cast<std::size_t>(peer) + sizes[i]));
        }
    }
}

TEST_CASE("MpiTransport sends what is a little longer than a quick message as a few of these") {
    const auto own = transport();
    const std::lock_guard lock(own->mutex());
    const std::size_t quick = own->quick_bytes();
    const int peer = 1 - own->rank();
    for (const std::size_t size : {5 * quick, 5 * quick + 1}) {
        const std::size_t parts = size == 5 * quick ? 5 : 1;
        CAPTURE(parts);
        CHECK(own->in_parts(size) == (parts > 1));
        const Bytes message = numbered(size, 1);
        Bytes place(size);
        gradsync::List<Ticket> tickets{own->send(peer, 3, message.data(), size, true)};
        for (std::size_t part = 0; part < parts; ++part)
            tickets.push_back(own->receive(peer, 3, place.data() + part * quick, size / parts));
        finish(*own, std::move(tickets));
        CHECK(place == message);
    }
}

TEST_CASE("MpiTransport: a rank that sends more than is due, or less, breaks nothing where there is room") {
    const auto own = transport();
    const std::lock_guard lock(own->mutex());
    const std::size_t quick = own->quick_bytes(), room = 2 * quick, due = quick + 100;
    const Bytes message = numbered(room, 0);
    if (own->rank() == 0) {
        // Whole messages come into places that others were to fill in part.
        finish(*own, {own->send(1, 3, message.data(), room, true), own->send(1, 3, message.data(), room, true),
                      own->send(1, 4, message.data(), quick / 2, true)});
    } else {
        std::vector<Bytes> places(3, Bytes(room));
        finish(*own, {own->receive(0, 3, places[0].data(), room, nullptr, due), own->receive(0, 3, places[1].data(), room, nullptr, due)});
        CHECK(places[0] == message);
        CHECK(places[1] == message);
        const Ticket ticket = own->receive(0, 4, places[2].data(), room, nullptr, due);
        for (int look = 0; look < 1000; ++look) own->poll();
        CHECK_FALSE(own->finish(ticket));
        CHECK(own->give_up(ticket));  // its second part never comes
    }
    // Both are as good as new.
    const int peer = 1 - own->rank();
    const Bytes hello = numbered(10, static_cast<std::size_t>(own->rank()));
    Bytes answer(10);
    finish(*own, {own->send(peer, 5, hello.data(), hello.size()), own->receive(peer, 5, answer.data(), answer.size())});
    CHECK(answer == numbered(10, static_cast<std::size_t>(peer)));
}

TEST_CASE("MpiTransport counts data that moves, and no control messages") {
    const auto own = transport();
    const std::lock_guard lock(own->mutex());
    const int peer = 1 - own->rank();
    const Bytes sent(10);
    Bytes place(10);
    for (const int stream : {MpiTransport::control_stream, 3}) {
        const std::uint64_t before = own->moved;
        finish(*own, {own->send(peer, stream, sent.data(), sent.size()), own->receive(peer, stream, place.data(), place.size())});
        CHECK((own->moved != before) == (stream == 3));
    }
}
