// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>

namespace gradsync::inline v0_2::message_passing {

/// Messages between the ranks of a world. Those from one rank to another in one stream arrive in the order in which they
/// were sent, each in the receive that was begun in its turn. Nothing moves but inside these calls.
///
/// Buffers belong to the transport until the message's ticket is `complete`. Calls throw std::exception where the
/// transport itself has failed; the caller holds `mutex()`.
class Transport {
public:
    using Ticket = std::uint32_t;
    static constexpr Ticket no_ticket = ~Ticket{0};
    static constexpr int any_rank = -1;
    static constexpr int control_stream = 0;

    virtual ~Transport() = default;

    virtual int rank() const noexcept = 0;
    virtual int size() const noexcept = 0;

    /// Streams are 0 to this number.
    virtual int last_stream() const noexcept = 0;

    /// Why the calling thread may not communicate now; nullptr if it may.
    virtual const char* refusal() const noexcept = 0;

    virtual std::mutex& mutex() noexcept = 0;

    /// The same on all ranks, in all calls. A few messages of no more bytes arrive sooner than one that is longer, because that one would
    /// ask the receiver before it leaves.
    virtual std::size_t quick_bytes() const noexcept { return std::size_t{1} << 30; }

    /// Has `poll` found that a rank's process is gone? A transport that cannot tell says no.
    virtual bool lost(int /*rank*/) const noexcept { return false; }

    virtual Ticket send(int rank, int stream, const void* data, std::size_t bytes) = 0;
    /// `bytes`: the most that may come.
    virtual Ticket receive(int rank, int stream, void* data, std::size_t bytes) = 0;

    /// Is a message of so many bytes quicker in parts? It can travel so if the receiver knows how long it is.
    virtual bool in_parts(std::size_t /*bytes*/) const noexcept { return false; }
    /// A message that travels so, where that is quicker. The one meets the other, with the same `bytes`, not 0.
    virtual Ticket send_known(int rank, int stream, const void* data, std::size_t bytes) { return send(rank, stream, data, bytes); }
    /// `room`: bytes that may be written. Whole quick messages, where a rank that errs may send something else in this stream.
    virtual Ticket receive_known(int rank, int stream, void* data, std::size_t /*bytes*/, std::size_t room) {
        return receive(rank, stream, data, room);
    }

    /// Moves what can be moved now; true if a message is over that was not.
    virtual bool poll() = 0;

    /// Has `poll` found the message to be over? Then its ticket is forgotten, and used for others.
    virtual bool finish(Ticket ticket) = 0;

    /// Forgets a message that may never be over. False where its buffer may still be touched, for as long as the process
    /// lives.
    virtual bool give_up(Ticket ticket) noexcept = 0;

    /// The same as `finish`, for a place of a ticket: true once there is none in it.
    bool finish_one(Ticket& ticket) {
        if (ticket != no_ticket && finish(ticket)) ticket = no_ticket;
        return ticket == no_ticket;
    }
    template <class Tickets>
    bool finish_all(Tickets& tickets) {
        bool all = true;
        for (Ticket& ticket : tickets) all &= finish_one(ticket);
        return all;
    }
    template <class Tickets>
    bool give_up_all(Tickets& tickets) noexcept {
        bool all = true;
        for (Ticket& ticket : tickets)
            if (const Ticket open = std::exchange(ticket, no_ticket); open != no_ticket) all &= give_up(open);
        return all;
    }
};

}  // namespace gradsync::inline v0_2::message_passing
