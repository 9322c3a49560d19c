// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <memory>
#include <mutex>
#include <stdexcept>

#include "../../core/list.hpp"
#include "../../core/text.hpp"

namespace gradsync::inline v0_2::message_passing {

using gradsync::detail::text;

/// A call has failed by itself, or because a process that it sends to is gone.
struct CallFailed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// A rank has sent data that no rank of this build sends.
struct Nonsense : std::runtime_error {
    Nonsense(int sender, const std::string& what)
        : std::runtime_error(text("rank ", sender, " sent ", what,
                                  "; give all ranks the same build, and look at that rank's machine")),
          rank(sender) {}
    int rank;
};

/// Messages between the ranks of a world. Messages from one rank to another in one stream arrive in the order in which
/// they were sent; receives match them in the order in which they began. Messages move only inside these calls.
///
/// Buffers belong to the transport until `finish` returns true for the message's ticket: a send may be complete before
/// it is received. No rank sends to itself. Calls throw std::exception if the transport itself has failed or the
/// receiver is gone, and Nonsense if a rank has sent invalid data. The caller must hold `mutex()`, each rank its own.
class Transport {
public:
    using Ticket = std::uint32_t;
    static constexpr Ticket no_ticket = ~Ticket{0};
    static constexpr int any_rank = -1;
    static constexpr int control_stream = 0;

    virtual ~Transport() = default;

    int rank() const noexcept { return rank_; }
    int size() const noexcept { return size_; }
    /// Streams are 0 to this number.
    int last_stream() const noexcept { return last_stream_; }

    /// Returns why the calling thread may not communicate now; nullptr if it may.
    virtual const char* refusal() const noexcept = 0;

    virtual std::mutex& mutex() noexcept = 0;

    /// The size up to which a message is sent without asking the receiver: a few such messages arrive sooner than a
    /// longer one. The same on all ranks, in all calls.
    virtual std::size_t quick_bytes() const noexcept { return std::size_t{1} << 30; }

    /// Can a quick message stay in this process until a later `poll`?
    virtual bool sends_in_poll() const noexcept { return false; }

    /// Is a rank's process gone, with everything that it sent received? A transport that cannot tell returns false.
    virtual bool lost(int /*rank*/) noexcept { return false; }
    /// If it is `lost`: did its host stop answering?
    virtual bool silent(int /*rank*/) const noexcept { return false; }
    /// Has everything that `finish` calls complete reached the rank's system?
    /// It can then be read even if this process ends.
    virtual bool arrived(int /*rank*/) const noexcept { return true; }

    /// How much of a large collective is under way at once. The same on all ranks, in all calls.
    struct Window {
        /// At least 3: one is sent, one combined, one received. More push pieces out of the cache before they are used.
        std::size_t rounds = 3;
        std::size_t round_bytes = std::size_t{2} << 20;  ///< all ranks' shares of a round, at most
    };
    Window window = {};  ///< set by the constructor

    /// Is a message of `bytes` bytes quicker in parts? It can travel in parts if the receiver knows its length.
    virtual bool in_parts(std::size_t /*bytes*/) const noexcept { return false; }

    /// `known`: the receiver knows the length, which is not 0. The message then travels in parts if that is quicker.
    virtual Ticket send(int rank, int stream, const void* data, std::size_t bytes, bool known = false) = 0;
    /// `room`: the largest message that may come. Its length is added to `came`, if that is not null. `known`: its
    /// length, if the sender marks it as known; `room` must then be a whole number of quick messages if an erring rank
    /// may send something else in this stream.
    virtual Ticket receive(int rank, int stream, void* data, std::size_t room, std::size_t* came = nullptr,
                           std::size_t known = 0) = 0;

    /// If it can tell, `poll` lets this grow while data moves to or from other ranks' systems, control messages aside.
    std::uint64_t moved = 0;

    /// Makes all possible progress; true if it completed a message.
    virtual bool poll() = 0;

    /// Has `poll` found the message complete? If so, its ticket is forgotten and may be reused.
    virtual bool finish(Ticket ticket) = 0;

    /// Forgets a message that may never complete. Returns false if its buffer may still
    /// be touched, until the process ends.
    virtual bool give_up(Ticket ticket) noexcept = 0;

    /// Forgets all messages from and to this memory. Returns false if it may still be touched, until the process ends.
    virtual bool release(const void* /*data*/, std::size_t /*bytes*/) noexcept { return false; }
    /// Declares that no more messages use the streams from `first` to `last`.
    virtual void forget(int /*first*/, int /*last*/) noexcept {}
    /// May it be destroyed once `arrived` is true for all ranks, although other messages are in flight?
    virtual bool ends_alone() const noexcept { return false; }

    /// The same as `finish`, and clears `ticket`. True if it holds no ticket.
    bool finish_one(Ticket& ticket) {
        if (ticket != no_ticket && finish(ticket)) ticket = no_ticket;
        return ticket == no_ticket;
    }
    bool finish_all(List<Ticket>& tickets) {
        bool all = true;
        for (Ticket& ticket : tickets) all &= finish_one(ticket);
        return all;
    }
    bool give_up_all(std::initializer_list<List<Ticket>*> lists) noexcept {
        bool all = true;
        for (List<Ticket>* tickets : lists)
            for (Ticket& ticket : *tickets)
                if (const Ticket open = std::exchange(ticket, no_ticket); open != no_ticket) all &= give_up(open);
        return all;
    }

protected:
    int rank_ = 0, size_ = 1, last_stream_ = 1 << 20;  ///< set by the constructor
};

/// How one rank of a communicator reaches the others, in streams of the communicator. The references must outlive it.
struct Route {
    /// Hellos and answers have three streams each: one for the message, one for its rest in parts,
    /// one for its rest in one message. Answers have streams of their own, because rank 0 may send the hello of a later
    /// collective before it can answer.
    enum Stream { hellos, rests, whole_rests, answers, answer_rests, whole_answer_rests, contributions, results };
    static constexpr int streams = 8;

    Transport& transport;
    const List<int>& transport_ranks;  ///< by rank of the communicator
    int rank;
    int communicator;  ///< its number

    int size() const noexcept { return static_cast<int>(transport_ranks.size()); }

    Transport::Ticket send(int to, int stream, const void* data, std::size_t bytes, bool known = false) const {
        return transport.send(other(to), number(stream), data, bytes, known);
    }
    Transport::Ticket receive(int from, int stream, void* data, std::size_t room, std::size_t* came,
                              std::size_t known = 0) const {
        return transport.receive(other(from), number(stream), data, room, came, known);
    }
    /// Throws if a rank has sent fewer or more bytes than were due.
    void check_length(int from, std::size_t bytes, std::size_t due) const {
        if (bytes != due) throw Nonsense(other(from), text("a message of ", bytes, " bytes where ", due, " were due"));
    }
    /// Declares that no more messages travel in its streams.
    void forget() const noexcept { transport.forget(number(0), number(streams - 1)); }

    int other(int member) const noexcept { return transport_ranks[member]; }

private:
    int number(int stream) const noexcept { return 1 + communicator * streams + stream; }
};

/// The tickets of a transport, with an entry for each. Tickets are reused.
template <class Entry>
class TicketBook {
public:
    Transport::Ticket add(Entry entry) {
        if (free_.empty()) {
            free_.reserve(entries_.size() + 1);  // removing an entry must not allocate
            free_.push_back(static_cast<Transport::Ticket>(entries_.size()));
            entries_.push_back({});
        }
        const Transport::Ticket ticket = free_.back();
        free_.pop_back();
        entries_[ticket] = entry;
        return ticket;
    }
    void remove(Transport::Ticket ticket) noexcept { free_.push_back(ticket); }
    Entry& operator[](Transport::Ticket ticket) noexcept { return entries_[ticket]; }

private:
    List<Entry> entries_;  ///< by ticket
    List<Transport::Ticket> free_;
};

/// Memory that outlives every message from or to it, so that messages need no copy. Thread-safe.
class KnownMemory {
public:
    void add(const void* base, std::size_t bytes) {
        std::lock_guard lock(mutex_);
        blocks_.push_back({reinterpret_cast<std::uintptr_t>(base), bytes});
    }
    void remove(const void* base) noexcept {
        std::lock_guard lock(mutex_);
        blocks_.erase_if([&](const Block& block) { return block.base == reinterpret_cast<std::uintptr_t>(base); });
    }
    bool contains(const void* address, std::size_t bytes) const noexcept {
        const auto at = reinterpret_cast<std::uintptr_t>(address);
        std::lock_guard lock(mutex_);
        for (const Block& block : blocks_)
            if (at >= block.base && at - block.base <= block.bytes && bytes <= block.bytes - (at - block.base))
                return true;
        return false;
    }

private:
    struct Block {
        std::uintptr_t base;
        std::size_t bytes;
    };

    mutable std::mutex mutex_;
    List<Block> blocks_;
};

}  // namespace gradsync::inline v0_2::message_passing
