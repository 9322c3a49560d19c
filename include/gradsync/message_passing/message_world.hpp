#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../collective/chores.hpp"
#include "../collective/process.hpp"
#include "../collective/world.hpp"
#include "../core/clock.hpp"
#include "known_memory.hpp"
#include "transport.hpp"

namespace gradsync::inline v0::message_passing {

namespace detail {
struct OwnState {
    collective::World::State state;
};
}  // namespace detail

/// The world of ranks that send one another messages. Failures, and who left, travel in a stream of their own, which each
/// rank looks into whenever it communicates.
class MessageWorld final : detail::OwnState, public collective::World {
public:
    /// `id`: the same on all ranks, and another in every world. `processes`: of all ranks. `ranks_here`: how many run on
    /// this machine.
    MessageWorld(std::unique_ptr<Transport> transport, std::uint64_t id, std::vector<collective::ProcessIdentity> processes, int ranks_here)
        : World(ranks_here, state), transport_(std::move(transport)), id_(id), processes_(std::move(processes)) {
        std::lock_guard lock(mutex());
        listen();
    }

    ~MessageWorld() override {
        deliver();
        const std::unique_lock lock(mutex());
        const bool may_call = transport_->refusal() == nullptr;
        const auto is_over = [&](Transport::Ticket ticket) { return ticket == Transport::no_ticket || (may_call && transport_->give_up(ticket)); };
        if (!is_over(incoming_ticket_)) keep_for_good(std::move(incoming_));
        for (Outgoing& outgoing : outgoing_)
            if (!is_over(outgoing.ticket)) keep_for_good(std::move(outgoing.memory));
    }

    Transport& transport() noexcept { return *transport_; }
    std::mutex& mutex() noexcept { return transport_->mutex(); }
    collective::Chores& chores() noexcept { return chores_; }

    /// The least number that a new communicator of this rank may have; 0 is the first one's.
    int next_communicator() const noexcept { return next_communicator_.load(std::memory_order_relaxed); }
    void set_next_communicator(int number) noexcept { next_communicator_.store(number, std::memory_order_relaxed); }

    bool alive(int world_rank) noexcept override {
        const auto& own = processes_[static_cast<std::size_t>(transport_->rank())];
        return processes_[static_cast<std::size_t>(world_rank)].alive(own);
    }

    /// Moves messages, and takes in what others say of themselves. Under the mutex.
    void poll() {
        transport_->poll();
        if (!announced_.load(std::memory_order_relaxed) && failed()) send_failure();
        std::erase_if(outgoing_, [&](Outgoing& outgoing) { return transport_->finish_one(outgoing.ticket); });
        while (transport_->finish_one(incoming_ticket_)) {
            take_in(*incoming_);
            listen();
        }
    }

    /// Sees to it that the others hear of a failure that this rank recorded; a second at most.
    void deliver() noexcept {
        if (transport_->refusal() != nullptr) return;
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
        try {
            for (bool first = true;; first = false) {
                {
                    std::lock_guard lock(mutex());
                    if (!first || failed()) poll();
                    if (outgoing_.empty()) return;
                }
                if (std::chrono::steady_clock::now() > deadline) return;
                std::this_thread::yield();
            }
        } catch (const std::exception&) {
            // Who cannot be told will run into its time limit.
        }
    }

    /// Keeps the memory of a message that is on its way until it has arrived. Under the mutex.
    void keep_until_over(Transport::Ticket ticket, std::shared_ptr<void> memory) {
        if (ticket != Transport::no_ticket) outgoing_.push_back({std::move(memory), ticket});
    }

    /// Tells the members of a communicator that this rank will start no collective from number `next` on. Under the mutex.
    void say_left(int communicator, std::span<const int> members, std::uint64_t next) {
        ControlMessage message = header(ControlMessage::left);
        message.communicator = communicator;
        message.next = next;
        for (const int member : members)
            if (member != transport_->rank() && !left(communicator, member)) post(member, message, offsetof(ControlMessage, text));
    }

    /// The number from which on `member` starts nothing more, once it has said so. Under the mutex.
    std::optional<std::uint64_t> left(int communicator, int member) const noexcept {
        for (const Leaver& leaver : leavers_)
            if (leaver.communicator == communicator && leaver.rank == member) return leaver.next;
        return std::nullopt;
    }
    /// Forgets who left a communicator that is no more. Under the mutex.
    void forget(int communicator) noexcept {
        std::erase_if(leavers_, [&](const Leaver& leaver) { return leaver.communicator == communicator; });
    }

private:
    struct ControlMessage {
        enum Kind : std::int32_t { failure, left };
        std::uint64_t world = 0;
        std::uint64_t next = 0;
        Kind kind = failure;
        std::int32_t sender = 0;
        std::int32_t communicator = 0;
        std::int32_t code = 0;
        std::int32_t culprit = 0;
        char text[1200] = {};
    };
    struct Outgoing {
        std::shared_ptr<void> memory;
        Transport::Ticket ticket;
    };
    struct Leaver {
        int communicator;
        int rank;
        std::uint64_t next;
    };

    ControlMessage header(ControlMessage::Kind kind) const noexcept {
        ControlMessage message;
        message.world = id_;
        message.kind = kind;
        message.sender = transport_->rank();
        return message;
    }

    void post(int rank, const ControlMessage& message, std::size_t bytes) {
        auto copy = std::make_shared<ControlMessage>(message);
        const Transport::Ticket ticket = transport_->send(rank, Transport::control_stream, copy.get(), bytes);
        outgoing_.push_back({std::move(copy), ticket});
    }

    void send_failure() {
        announced_.store(true, std::memory_order_relaxed);
        const collective::Failure failure = this->failure();
        ControlMessage message = header(ControlMessage::failure);
        message.code = static_cast<std::int32_t>(failure.code);
        message.culprit = failure.culprit;
        const std::size_t length = std::min(failure.message.size(), sizeof message.text - 1);
        std::memcpy(message.text, failure.message.data(), length);
        for (int r = 0; r < transport_->size(); ++r)
            if (r != transport_->rank()) post(r, message, offsetof(ControlMessage, text) + length + 1);
    }

    void take_in(const ControlMessage& message) {
        if (message.world != id_) return;  // of an earlier world, whose ranks left at different times
        if (message.kind == ControlMessage::failure) {
            announced_.store(true, std::memory_order_relaxed);  // the others hear it from where we have it
            record({static_cast<Errc>(message.code), message.culprit, message.text});
        } else {
            leavers_.push_back({message.communicator, message.sender, message.next});
        }
    }

    void listen() {
        incoming_ticket_ = transport_->receive(Transport::any_rank, Transport::control_stream, incoming_.get(), sizeof *incoming_);
    }

    std::unique_ptr<Transport> transport_;
    const std::uint64_t id_;
    const std::vector<collective::ProcessIdentity> processes_;
    collective::Chores chores_;

    std::atomic<bool> announced_{false};
    std::atomic<int> next_communicator_{1};
    std::shared_ptr<ControlMessage> incoming_ = std::make_shared<ControlMessage>();
    Transport::Ticket incoming_ticket_ = Transport::no_ticket;
    std::vector<Outgoing> outgoing_;
    std::vector<Leaver> leavers_;
};

}  // namespace gradsync::inline v0::message_passing
