// ctest: MPI RANKS 2
// Messages of MPI between two ranks.
#include <gradsync/backend/mpi_transport.hpp>

#include <doctest/doctest.h>

#include <cstddef>
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
    return std::make_unique<MpiTransport>(MPI_COMM_WORLD);
}

Bytes numbered(std::size_t bytes, std::size_t salt) {
    Bytes values(bytes);
    for (std::size_t i = 0; i < bytes; ++i) values[i] = static_cast<unsigned char>((i * 7 + i / 251 + salt) % 256);
    return values;
}

void finish(MpiTransport& own, std::vector<Ticket> tickets) {
    while (!own.finish_all(tickets)) own.poll();
}

}  // namespace

TEST_CASE("MpiTransport: messages of known length arrive whole and in their order, in as many parts as may be") {
    const auto own = transport();
    const std::lock_guard lock(own->mutex());
    const std::size_t quick = own->quick_bytes();
    REQUIRE(quick < 100'000);  // both ranks are on one machine
    std::vector<std::size_t> sizes;
    for (const std::size_t parts : {1, 2, 5, 9, 10})
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
        std::vector<Ticket> tickets;
        const auto receive = [&] {
            for (Bytes& message : received) tickets.push_back(own->receive_known(peer, 3, message.data(), message.size(), message.size()));
        };
        if (receives_first) receive();
        for (const Bytes& message : sent) tickets.push_back(own->send_known(peer, 3, message.data(), message.size()));
        if (!receives_first) receive();
        finish(*own, std::move(tickets));
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            CAPTURE(sizes[i]);
            CHECK(received[i] == numbered(sizes[i], static_cast<std::size_t>(peer) + sizes[i]));
        }
    }
}

TEST_CASE("MpiTransport: a rank that sends more than is due, or less, breaks nothing where there is room") {
    const auto own = transport();
    const std::lock_guard lock(own->mutex());
    const std::size_t quick = own->quick_bytes(), room = 4 * quick, due = quick + 100;
    for (const std::size_t size : {room, quick / 2}) {
        CAPTURE(size);
        const int stream = size == room ? 3 : 4;
        const Bytes message = numbered(size, 0);
        if (own->rank() == 0) {
            finish(*own, {own->send_known(1, stream, message.data(), size)});
        } else {
            Bytes place(room);
            const Ticket ticket = own->receive_known(0, stream, place.data(), due, room);
            if (size == room) finish(*own, {ticket});
            else CHECK(own->give_up(ticket));  // its second part never comes
            for (std::size_t i = 0; i < due && size == room; ++i)
                if (place[i] != message[i]) FAIL("byte " << i << " is wrong");
        }
    }
    // Both are as good as new.
    const int peer = 1 - own->rank();
    const Bytes hello = numbered(10, static_cast<std::size_t>(own->rank()));
    Bytes answer(10);
    finish(*own, {own->send(peer, 5, hello.data(), hello.size()), own->receive(peer, 5, answer.data(), answer.size())});
    CHECK(answer == numbered(10, static_cast<std::size_t>(peer)));
}
