// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>

#include <unistd.h>

#include "../failures.hpp"
#include "../process.hpp"
#include "lifeline.hpp"
#include "transport.hpp"

namespace gradsync::inline v0_2::message_passing {

using collective::Shared;

/// The world of ranks that send one another messages. Failures and departures travel in a separate stream, which each
/// rank reads whenever it communicates.
class MessageWorld final : public collective::World {
public:
    /// `processes`: those of all ranks. `ranks_here`: number of ranks on this machine. `twin`: another world of this
    /// rank, if there is one: both fail together, and share their hooks.
    ///
    /// Another rank's message may still be on its way when the last owner goes. So the world and its transport
    /// are destroyed later: when another world is made or goes, and all other ranks have said good-bye to this one.
    /// A failed world is destroyed once the news of the failure has arrived, if its transport
    /// allows that; otherwise never.
    static Shared<MessageWorld> make(std::unique_ptr<Transport> transport, List<collective::ProcessIdentity> processes,
                                     int ranks_here, const World* twin = nullptr) {
        sweep();
        return Shared<MessageWorld>::of(new MessageWorld(std::move(transport), std::move(processes), ranks_here, twin),
                                        [](MessageWorld* world) { world->retire(); });
    }

    Transport& transport() noexcept { return *transport_.get(); }
    std::mutex& mutex() noexcept { return transport_->mutex(); }

    /// The smallest number that a new communicator of this rank may have; 0 is the first communicator.
    std::atomic<int> next_communicator{1};

    /// The connections that watch ranks of other machines, if there are any.
    Lifeline& lifeline() noexcept { return lifeline_; }

    /// Requires the mutex.
    bool alive(int world_rank) noexcept override {
        const auto& own = processes_[transport_->rank()];
        return processes_[world_rank].alive(own) && !transport_->lost(world_rank) && !lifeline_.lost(world_rank);
    }

    /// The failure to report for a rank that died while `what` was in progress. Requires the mutex.
    [[gnu::cold]] collective::Failure end_of(int world_rank, const std::string& what) {
        const bool silent = transport_->silent(world_rank) || lifeline_.silent(world_rank);
        return silent ? collective::vanished(what, world_rank, net::answer_limit) : collective::died(what, world_rank);
    }

    /// Do all these ranks run on one machine with fewer cores than ranks? The same answer on all ranks.
    bool share_cores(std::span<const int> world_ranks) const noexcept {
        const collective::ProcessIdentity& first = processes_[world_ranks.front()];
        for (const int r : world_ranks)
            if (processes_[r].machine != first.machine || processes_[r].system != first.system) return false;
        return first.machine != 0 && first.cores != 0 && static_cast<std::int64_t>(world_ranks.size()) > first.cores;
    }

    /// Moves messages, and reads other ranks' control messages. Requires the mutex.
    void poll() {
        if (transport_->poll()) arrivals_.fetch_add(1, std::memory_order_relaxed);
        if (std::exchange(moved_, transport_->moved) != transport_->moved) {
            moved.fetch_add(1, std::memory_order_relaxed);
            moved_at_ = std::chrono::steady_clock::now();
        }
        while (transport_->finish_one(incoming_ticket_)) {
            take_in(incoming_, std::exchange(incoming_bytes_, 0));
            listen();
        }
        if (!announced_.load(std::memory_order_relaxed) && failed()) send_failure();
        outgoing_.erase_if([&](Outgoing& outgoing) { return transport_->finish_one(outgoing.ticket); });
    }

    std::uint64_t arrivals() const noexcept override { return arrivals_.load(std::memory_order_relaxed); }

    /// Call after the world has failed. Tells the others, and waits once until the news has reached their systems, for
    /// a thirtieth of `limit`, but at least one and at most ten seconds: a computing rank reads nothing, and when a
    /// process ends with unread messages, its system drops what it has not sent.
    [[gnu::cold]] void deliver(std::chrono::nanoseconds limit = {}) noexcept {
        using gradsync::detail::larger, gradsync::detail::smaller;
        if (transport_->refusal() != nullptr) return;
        const std::chrono::nanoseconds least = std::chrono::seconds(1), most = std::chrono::seconds(10);
        const bool again = delivered_.exchange(true, std::memory_order_relaxed);
        const auto deadline = std::chrono::steady_clock::now() +
                              (again ? std::chrono::seconds(0) : larger(least, smaller(limit / 30, most)));
        try {
            do {
                std::lock_guard lock(mutex());
                poll();
                if (is_delivered()) return;
            } while (std::chrono::steady_clock::now() <= deadline && (::usleep(50), true));
        } catch (const std::exception&) {
            // Ranks that cannot be told will time out.
        }
    }

    /// Keeps the memory of a message to a rank until the message has arrived. Requires the mutex.
    void keep_until_over(Transport::Ticket ticket, int rank, Shared<void> memory) {
        if (ticket != Transport::no_ticket) outgoing_.push_back({std::move(memory), ticket, rank});
    }

    /// Tells the members of a communicator that this rank will start no collective from number
    /// `next` on. Requires the mutex.
    void say_left(int communicator, std::span<const int> members, std::uint64_t next) {
        for (const int member : members)
            if (member != transport_->rank() && !left(communicator, member))
                post(member, {.next = next, .kind = ControlMessage::has_left, .communicator = communicator});
    }

    /// Returns the number from which on `member` starts no collective, once it has said so. Requires the mutex.
    std::optional<std::uint64_t> left(int communicator, int member) const noexcept {
        for (const Leaver& leaver : leavers_)
            if (leaver.communicator == communicator && leaver.rank == member) return leaver.next;
        return std::nullopt;
    }
    /// Opens or closes a communicator of this rank. On close, it forgets which ranks left the communicator.
    /// Requires the mutex.
    void enlist(int communicator) { communicators_.push_back(communicator); }
    void dismiss(int communicator) noexcept {
        communicators_.erase_if([&](int one) { return one == communicator; });
        leavers_.erase_if([&](const Leaver& leaver) { return leaver.communicator == communicator; });
    }

    /// Asks a rank which rank it waits for. A waiting rank answers. `limit`: that of the wait which has passed; the
    /// other rank may have a longer one. Requires the mutex.
    [[gnu::cold]] void ask(int rank, std::chrono::nanoseconds limit) noexcept {
        asked_ = rank;
        answer_.reset();
        try_post(rank, {.next = static_cast<std::uint64_t>(limit.count()), .kind = ControlMessage::asks});
    }
    /// The answer of a rank whose data moved in the last quarter of the limit: a slow network holds it up, and nobody
    /// is to blame.
    static constexpr int nobody = -2;
    /// That rank's answer to the last question: a rank, -1 if it does not know, or `nobody`.
    std::optional<int> answer_of(int rank) const noexcept { return rank == asked_ ? answer_ : std::nullopt; }
    /// Has a rank asked this one? Requires the mutex.
    bool is_asked() const noexcept { return !asking_.empty(); }
    [[gnu::cold]] void answer(int late) noexcept {
        const std::chrono::nanoseconds still = std::chrono::steady_clock::now() - moved_at_;
        for (const auto& [rank, limit] : asking_)
            try_post(rank, {.kind = ControlMessage::waits, .culprit = still < limit / 4 ? nobody : late});
        asking_.clear();
    }

    /// Call before freeing memory that messages of a failed world may use. Returns false if they may still touch it.
    [[gnu::cold]] bool release(const void* data, std::size_t bytes) noexcept {
        if (transport_->refusal() != nullptr) return false;
        std::lock_guard lock(mutex());
        return transport_->release(data, bytes);
    }

private:
    [[gnu::cold]] MessageWorld(std::unique_ptr<Transport> transport, List<collective::ProcessIdentity> processes,
                               int ranks_here, const World* twin)
        : World(ranks_here, twin ? twin->shared_state() : Shared<State>::make(),
                twin ? twin->shared_hooks() : Shared<collective::ProgressHooks>::make()),
          transport_(std::move(transport)),
          processes_(std::move(processes)) {
        std::lock_guard lock(mutex());
        listen();
    }

    /// Keeps another world without owners, and destroys those that are quiet by now.
    /// A forked child leaves its parent's worlds alone.
    [[gnu::cold]] static void sweep(MessageWorld* another = nullptr) {
        static auto& mutex = *new std::mutex;  // never destroyed: threads may outlive static objects
        static auto& worlds = *new List<MessageWorld*>;
        std::lock_guard lock(mutex);
        if (another != nullptr) worlds.push_back(another);
        worlds.erase_if([](MessageWorld* world) {
            const bool quiet = world->maker_.is_here() && world->is_quiet();
            if (quiet) delete world;
            return quiet;
        });
    }

    [[gnu::cold]] void retire() noexcept {
        if (failed()) deliver();
        lifeline_.close();
        try {
            if (transport_->refusal() == nullptr) {
                std::lock_guard lock(mutex());
                // Ranks that have said good-bye still wait for this rank's good-bye.
                for (int r = 0; r < transport_->size(); ++r)
                    if (r != transport_->rank() && alive(r)) post(r, {.kind = ControlMessage::is_gone});
                poll();
            }
        } catch (const std::exception&) {
            // Ranks that cannot be told will time out.
        }
        try {
            sweep(this);
        } catch (const std::bad_alloc&) {
            // The world stays.
        }
    }

    /// Have all messages arrived, with none to follow?
    [[gnu::cold]] bool is_quiet() noexcept {
        if (transport_->refusal() != nullptr) return false;
        try {
            std::lock_guard lock(mutex());
            poll();
            if (failed()) return transport_->ends_alone() && is_delivered();
            int gone = 0;
            for (const bool one : gone_) gone += one;
            return outgoing_.empty() && gone == transport_->size() - 1 && transport_->give_up(incoming_ticket_);
        } catch (const std::exception&) {
            return false;
        }
    }

    struct ControlMessage {
        enum Kind : std::int32_t { has_failed, has_left, is_gone, asks, waits };
        std::uint64_t next = 0;
        Kind kind = has_failed;
        std::int32_t sender = 0;
        std::int32_t communicator = 0;
        std::int32_t code = 0;
        std::int32_t culprit = 0;
        char text[1200] = {};
    };
    /// A rank that starts nothing more in a communicator, from a number on.
    struct Leaver {
        int communicator, rank;
        std::uint64_t next;
    };
    /// A rank whose wait has reached its limit asks what this rank waits for.
    struct Question {
        int rank;
        std::chrono::nanoseconds limit;
    };
    struct Outgoing {
        Shared<void> memory;
        Transport::Ticket ticket;
        int rank;
    };

    /// Can that rank still receive a message? Requires the mutex.
    bool listens(int rank) noexcept { return !gone_[rank] && alive(rank); }

    /// Has everything sent reached the ranks that are there? Requires the mutex.
    [[gnu::cold]] bool is_delivered() noexcept {
        for (const Outgoing& outgoing : outgoing_)
            if (listens(outgoing.rank)) return false;
        for (int r = 0; r < transport_->size(); ++r)
            if (r != transport_->rank() && !transport_->arrived(r) && listens(r)) return false;
        return true;
    }

    [[gnu::cold]] void post(int rank, const ControlMessage& message) {
        auto copy = Shared<ControlMessage>::make(message);
        copy->sender = transport_->rank();
        const std::size_t bytes = offsetof(ControlMessage, text) + std::strlen(copy->text) + 1;
        const Transport::Ticket ticket = transport_->send(rank, Transport::control_stream, copy.get(), bytes);
        outgoing_.push_back({std::move(copy), ticket, rank});
    }

    [[gnu::cold]] void try_post(int rank, const ControlMessage& message) noexcept {
        try {
            post(rank, message);
        } catch (const std::exception&) {
            // Other ranks may still be told.
        }
    }

    [[gnu::cold]] void send_failure() {
        announced_.store(true, std::memory_order_relaxed);
        const collective::Failure failure = this->failure();
        ControlMessage message{.kind = ControlMessage::has_failed,
                               .code = static_cast<std::int32_t>(failure.code),
                               .culprit = failure.culprit};
        failure.message.copy(message.text, sizeof message.text - 1);
        for (int r = 0; r < transport_->size(); ++r)
            if (r != transport_->rank() && listens(r)) try_post(r, message);
    }

    [[gnu::cold]] void take_in(const ControlMessage& message, std::size_t bytes) {
        const auto is_rank = [&](std::int32_t number) { return number >= 0 && number < transport_->size(); };
        const bool fails = message.kind == ControlMessage::has_failed;
        if (bytes <= offsetof(ControlMessage, text) || message.kind < ControlMessage::has_failed ||
            message.kind > ControlMessage::waits || message.communicator < 0 || !is_rank(message.sender) ||
            message.sender == transport_->rank() || (fails && !is_errc(message.code)) ||
            ((fails || message.kind == ControlMessage::waits) && message.culprit != -1 &&
             (fails || message.culprit != nobody) && !is_rank(message.culprit)))
            return fail({Errc::peer_failed, -1, "another rank sent nonsense; all ranks must run the same program"});
        if (fails) {
            const std::size_t room = bytes - offsetof(ControlMessage, text);
            fail({static_cast<Errc>(message.code), message.culprit, {message.text, ::strnlen(message.text, room)}});
        } else if (message.kind == ControlMessage::has_left) {
            bool matters = message.communicator >= next_communicator;
            for (const int communicator : communicators_) matters |= communicator == message.communicator;
            if (matters) leavers_.push_back({message.communicator, message.sender, message.next});
        } else if (message.kind == ControlMessage::asks) {
            constexpr std::uint64_t most = std::chrono::nanoseconds::max().count();
            asking_.erase_if([&](const Question& one) { return one.rank == message.sender; });
            asking_.push_back({message.sender, std::chrono::nanoseconds(detail::smaller(message.next, most))});
        } else if (message.kind == ControlMessage::waits) {
            if (message.culprit == nobody) moved.fetch_add(1, std::memory_order_relaxed);
            if (message.sender == asked_) answer_ = message.culprit;
        } else {
            gone_[message.sender] = true;
        }
    }

    void listen() {
        incoming_ticket_ = transport_->receive(Transport::any_rank, Transport::control_stream, &incoming_,
                                               sizeof incoming_, &incoming_bytes_);
    }

    std::unique_ptr<Transport> transport_;
    const List<collective::ProcessIdentity> processes_;
    const detail::Maker maker_;
    Lifeline lifeline_;

    std::atomic<std::uint64_t> arrivals_{0};
    std::atomic<bool> announced_{false}, delivered_{false};
    ControlMessage incoming_;
    std::size_t incoming_bytes_ = 0;
    std::uint64_t moved_ = 0;  ///< as the transport counts
    std::chrono::steady_clock::time_point moved_at_ = {};
    Transport::Ticket incoming_ticket_ = Transport::no_ticket;
    List<Outgoing> outgoing_;
    List<int> communicators_;  ///< of this rank
    List<Leaver> leavers_;
    List<Question> asking_;  ///< which this rank has not answered yet
    int asked_ = -1;         ///< the rank that was asked last
    std::optional<int> answer_;
    List<bool> gone_ = List<bool>(processes_.size());  ///< by rank: it has said good-bye and sends nothing more
};

}  // namespace gradsync::inline v0_2::message_passing
