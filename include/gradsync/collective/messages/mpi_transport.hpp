// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cassert>

#include "../../bootstrap/mpi_rendezvous.hpp"
#include "transport.hpp"

namespace gradsync::inline v0_2::detail {

/// Frees a communicator when it is destroyed. Null if the program frees it.
using MpiOwner = Shared<void>;

[[gnu::cold]] inline MpiOwner mpi_owner(MPI_Comm comm) {
    return Shared<MPI_Comm>::of(new MPI_Comm(comm), [](MPI_Comm* own) {
        MPI_Comm_free(own);
        delete own;
    });
}

/// MPI messages between the ranks of a communicator that nothing else uses.
///
/// MPI must allow calls from the calling thread: any thread with MPI_THREAD_MULTIPLE; one at a time with
/// MPI_THREAD_SERIALIZED (all transports of the process share one mutex; the program must serialise its own calls);
/// otherwise the main thread only.
class MpiTransport final : public message_passing::Transport {
public:
    /// Sends in `comm`, which must serve no other transport. Without an `owner` it must live until MPI is finalised.
    /// `one_machine`: all ranks of `comm` run on one machine.
    [[gnu::cold]] MpiTransport(MPI_Comm comm, MpiOwner owner, bool one_machine)
        : comm_(comm), owner_(std::move(owner)), one_machine_(one_machine) {
        std::lock_guard lock(mutex());
        MPI_Comm_get_errhandler(comm_, &error_handler_);
        MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
        MPI_Comm_rank(comm_, &rank_);
        MPI_Comm_size(comm_, &size_);
        MPI_Query_thread(&thread_level_);
        last_stream_ = bootstrap::liveness_tag() - 1;
        // MPI_Finalize deletes the attributes of MPI_COMM_SELF before anything else: the last chance to clean up.
        key_ = bootstrap::make_key([](MPI_Comm, int, void* self, void*) -> int {
            static_cast<MpiTransport*>(self)->close();
            return MPI_SUCCESS;
        });
        MPI_Comm_set_attr(MPI_COMM_SELF, key_, this);
    }

    /// Lets the owner free the communicator if no message is in flight. The standard calls that collective, but it is
    /// local in practice. In Open MPI 4, a message for a freed communicator ends the process.
    [[gnu::cold]] ~MpiTransport() override {
        if (refusal() != nullptr) {
            leak_until_exit(owner_);
            return;
        }
        std::lock_guard lock(mutex());
        MPI_Comm_delete_attr(MPI_COMM_SELF, key_);  // calls close()
        MPI_Comm_free_keyval(&key_);
        MPI_Errhandler present = MPI_ERRHANDLER_NULL;
        MPI_Comm_get_errhandler(comm_, &present);
        if (present == MPI_ERRORS_RETURN)
            MPI_Comm_set_errhandler(comm_, error_handler_);  // otherwise the program has set its own
        if (present != MPI_ERRHANDLER_NULL) MPI_Errhandler_free(&present);
        MPI_Errhandler_free(&error_handler_);
        if (requests_.empty()) owner_.reset();
        else leak_until_exit(owner_);
    }

    const char* refusal() const noexcept override {
        if (closed_.load(std::memory_order_relaxed)) return "MPI was finalised; do so after the last collective";
        return bootstrap::refusal_of_thread(thread_level_);
    }

    std::mutex& mutex() noexcept override { return bootstrap::mpi_mutex(); }

    /// Between processes of one machine, Open MPI sends up to 4 KiB, header included, without asking the receiver.
    /// Networks allow more.
    std::size_t quick_bytes() const noexcept override { return one_machine_ ? 4000 : Transport::quick_bytes(); }

    bool in_parts(std::size_t bytes) const noexcept override { return bytes <= max_parts * quick_bytes(); }
    Ticket send(int rank, int stream, const void* data, std::size_t bytes, bool known = false) override {
        return begin({.receives = false}, rank, stream, const_cast<void*>(data), bytes, known ? bytes : 0);
    }
    Ticket receive(int rank, int stream, void* data, std::size_t room, std::size_t* came = nullptr,
                   std::size_t known = 0) override {
        assert(known <= room);
        return begin({.receives = true, .came = came}, rank, stream, data, room, known);
    }

    bool poll() override {
        if (requests_.empty()) return false;
        finished_.resize(requests_.size());
        statuses_.resize(requests_.size());
        int count = 0;
        int code = MPI_SUCCESS;
        // Open MPI first looks for completed requests, and moves messages only if there are none: the second look sees
        // what it has moved.
        for (int looks = 0; looks < 2 && count == 0 && code == MPI_SUCCESS; ++looks)
            code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, finished_.data(),
                                statuses_.data());
        if (code == MPI_SUCCESS && (count == MPI_UNDEFINED || count == 0)) return false;
        for (int i = 0; i < count && code == MPI_SUCCESS; ++i) {
            int bytes = 0;
            std::size_t* const came = tickets_[request_tickets_[finished_[i]]].came;
            if (came != nullptr && MPI_Get_count(&statuses_[i], MPI_BYTE, &bytes) == MPI_SUCCESS)
                *came += static_cast<std::size_t>(bytes);
        }
        // Completed requests are null now, even if another one has failed.
        request_tickets_.erase_if([&, i = std::size_t{0}](Ticket ticket) mutable {
            const bool over = requests_[i++] == MPI_REQUEST_NULL;
            tickets_[ticket].open -= over;
            moved += over && tickets_[ticket].counts;
            return over;
        });
        requests_.erase_if([](MPI_Request request) { return request == MPI_REQUEST_NULL; });
        check_mpi(code, "MPI_Testsome");
        return true;
    }

    bool finish(Ticket ticket) override {
        if (tickets_[ticket].open != 0) return false;
        tickets_.remove(ticket);
        return true;
    }

    [[gnu::cold]] bool give_up(Ticket ticket) noexcept override {
        for (std::size_t i = requests_.size(); i-- > 0 && tickets_[ticket].open != 0;) {
            if (request_tickets_[i] != ticket) continue;
            int over = 0;
            if (tickets_[ticket].receives) MPI_Cancel(&requests_[i]);
            MPI_Test(&requests_[i], &over, MPI_STATUS_IGNORE);
            if (!over) return false;  // the request stays, and so does the communicator
            requests_[i] = requests_.back();
            request_tickets_[i] = request_tickets_.back();
            requests_.pop_back();
            request_tickets_.pop_back();
            --tickets_[ticket].open;
        }
        return finish(ticket) && !orphans_;
    }

private:
    struct Entry {
        bool receives = false;
        bool counts = false;          ///< as data that moves
        std::uint32_t open = 0;       ///< incomplete requests
        std::size_t* came = nullptr;  ///< see `receive`
    };

    /// More parts than this are slower than asking the receiver and copying once from memory to memory
    /// (docs/background/lab-notes.md).
    static constexpr std::size_t max_parts = 5;

    /// Begins a message. If its length is `known`, it goes in parts where that is quicker. `room`: bytes that may be
    /// touched at `data`.
    Ticket begin(Entry entry, int rank, int stream, void* data, std::size_t room, std::size_t known) {
        entry.counts = stream != control_stream;
        const Ticket ticket = tickets_.add(entry);
        const std::size_t part = known != 0 && in_parts(known) ? quick_bytes() : room;
        std::size_t from = 0;
        try {
            do begin(ticket, rank, stream, static_cast<std::byte*>(data) + from, smaller(part, room - from));
            while ((from += part) < known);
        } catch (...) {
            orphans_ |= from != 0;  // parts are in flight, and no caller has their ticket
            throw;
        }
        return ticket;
    }

    static void check_mpi(int code, const char* function, int peer = any_rank) {
        if (code == MPI_SUCCESS) return;
        const std::string what = bootstrap::mpi_text(function, code);
        throw message_passing::CallFailed(
            peer == any_rank ? what : message_passing::text(what, ", with rank ", peer, " of its communicator"));
    }

    void begin(Ticket ticket, int rank, int stream, void* data, std::size_t bytes) {
        // Make room for the request first: one that has begun must be recorded.
        MPI_Request request = MPI_REQUEST_NULL;
        requests_.reserve(requests_.size() + 1);
        request_tickets_.reserve(requests_.size() + 1);
        const int count = static_cast<int>(bytes), other = rank == any_rank ? MPI_ANY_SOURCE : rank;
        if (tickets_[ticket].receives)
            check_mpi(MPI_Irecv(data, count, MPI_BYTE, other, stream, comm_, &request), "MPI_Irecv", rank);
        else check_mpi(MPI_Isend(data, count, MPI_BYTE, other, stream, comm_, &request), "MPI_Isend", rank);
        requests_.push_back(request);
        request_tickets_.push_back(ticket);
        ++tickets_[ticket].open;
    }

    [[gnu::cold]] void close() noexcept {
        closed_.store(true, std::memory_order_relaxed);
        for (std::size_t i = requests_.size(); i-- > 0; i = smaller(i, requests_.size())) give_up(request_tickets_[i]);
    }

    MPI_Comm comm_;
    MpiOwner owner_;
    const bool one_machine_;
    MPI_Errhandler error_handler_ = MPI_ERRHANDLER_NULL;
    int thread_level_ = MPI_THREAD_SINGLE;
    int key_ = MPI_KEYVAL_INVALID;
    std::atomic<bool> closed_{false};  ///< MPI was finalised
    bool orphans_ = false;             ///< a message without a ticket may use a caller's memory until the process ends

    message_passing::TicketBook<Entry> tickets_;
    List<MPI_Request> requests_;    ///< incomplete requests
    List<Ticket> request_tickets_;  ///< their tickets
    List<int> finished_;            ///< scratch
    List<MPI_Status> statuses_;     ///< scratch
};

}  // namespace gradsync::inline v0_2::detail
