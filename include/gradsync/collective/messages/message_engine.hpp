// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../in_flight.hpp"
#include "message_failure_detector.hpp"

namespace gradsync::inline v0_2::message_passing {

using collective::Failure;
using gradsync::detail::leak_until_exit;

/// A communicator of ranks that send one another messages, for buffers in any memory.
///
/// Every collective begins with a small message from every rank to every other, which says what it has started. So each
/// rank knows which others have started, and that all have started the same. If few ranks do the work, the message goes
/// to rank 0 only, which checks for all (see PendingCollective). Small data travels in this message. Larger data
/// travels in rounds; several rounds are in flight at a time, of one collective after another.
///
/// Messages from and to user memory go through buffers of the engine, unless that memory is known to outlive every
/// message. So a failing rank can be unwound at once, whatever the others do.
///
/// Thread-safe, for the threads that the transport allows.
class MessageEngine final : public collective::Engine {
    using Clock = std::chrono::steady_clock;

public:
    static constexpr std::size_t slots = 256;  ///< collectives in flight before a start must wait

    /// `world_ranks[r]` is the world rank of rank r. `communicator`: its number, the same on all its ranks.
    /// Communicators that share a rank must have different numbers.
    [[gnu::cold]] MessageEngine(Shared<MessageWorld> world, List<int> world_ranks, int rank, int communicator,
                                Shared<KnownMemory> known, std::chrono::nanoseconds timeout)
        : Engine(std::move(world_ranks), rank, timeout),
          world_(std::move(world)),
          known_(std::move(known)),
          route_{world_->transport(), *this->world_ranks(), rank, communicator} {
        {
            const std::lock_guard lock(world_->mutex());
            world_->enlist(communicator);
        }
        world_->hooks().enlist(*this);  // not under the world's mutex, which hooks lock
    }
    ~MessageEngine() override {
        world_->hooks().dismiss(*this);
        const std::lock_guard lock(world_->mutex());
        if (world_->failed() || world_->transport().refusal() != nullptr) {
            give_up();
        } else {
            try {
                pending_.retire([this](const Shared<PendingCollective>& last) {
                    for (int r = 0; r < size(); ++r)
                        for (const Transport::Ticket ticket : last->out_to(r))
                            world_->keep_until_over(ticket, world_rank(r), last);
                    return true;
                });
                world_->say_left(route_.communicator, *world_ranks(), pending_.next());
            } catch (const std::exception&) {
                // Ranks that wait for this one will time out.
            }
        }
        world_->dismiss(route_.communicator);
        route_.forget();
    }

    MessageWorld& world() const noexcept override { return *world_; }

    /// Makes each rank's elements count as the sum of several leaves: `leaves`, by rank. Call before the first
    /// collective, the same on all ranks.
    void set_leaves(List<std::size_t> leaves) { combiner_.set_leaves(std::move(leaves)); }

    /// Starts this rank's next collective and returns its number. Waits only if `slots` are in flight. Throws Error if
    /// the world has failed.
    std::uint64_t start(const Call& call, ShardStep* = nullptr) override {
        check_thread(call.operation);
        return start_in_turn(call.operation, [&](std::uint64_t& oldest) -> std::optional<std::uint64_t> {
            std::lock_guard lock(world_->mutex());
            if (pending_.size() == slots) advance();
            oldest = pending_.first();
            if (world_->failed() || pending_.size() == slots) return std::nullopt;
            return begin(call);
        });
    }

    /// Makes all possible progress; never blocks.
    void progress() noexcept override {
        std::unique_lock lock(world_->mutex(), std::try_to_lock);
        if (lock) advance_timed();
    }

    void deliver_failure() noexcept override { world_->deliver(timeout()); }

    /// The time that this rank has spent in `progress()` and `test()`.
    std::chrono::nanoseconds progress_time() const noexcept override {
        return progress_time_.load(std::memory_order_relaxed);
    }

    std::optional<Call> advance_to(std::uint64_t n) noexcept override {
        std::lock_guard lock(world_->mutex());
        if (is_complete(n)) return std::nullopt;
        advance_timed();
        return is_complete(n) ? std::nullopt : std::optional(pending(n).call());
    }

    void check_thread(Operation operation) const override {
        if (const char* const refusal = world_->transport().refusal())
            detail::refuse({name_of(operation).data(), own_world_rank()}, refusal);
    }

    void look(std::uint64_t n, collective::Deadline& deadline) override {
        std::lock_guard lock(world_->mutex());
        if (!is_complete(n) && !world_->failed()) look(deadline);
    }

    void wait(std::uint64_t n) override { wait_for(n, false); }
    void make_room(std::uint64_t oldest) override { wait_for(oldest, true); }

    /// Is collective n known to be complete? Does no work.
    bool done(std::uint64_t n) {
        std::lock_guard lock(world_->mutex());
        return is_complete(n);
    }

    /// The ranks that hold up collective n.
    collective::Late late(std::uint64_t n) override {
        std::lock_guard lock(world_->mutex());
        // Collectives after number `heard_` are not heard of yet.
        return is_complete(n) ? collective::Late() : detector_.late(pending(n < heard_ ? n : heard_));
    }

    /// For callers that wait elsewhere: returns `use(world, detector)`.
    template <class Use>
    [[gnu::cold]] auto consult(Use&& use) {
        std::lock_guard lock(world_->mutex());
        return use(*world_, detector_);
    }

    /// The liveness check of a wait, for callers that wait elsewhere: ends the world if a rank has left or died, and so
    /// does not start a collective of this one.
    [[gnu::cold]] void look_for_missing() noexcept {
        std::unique_lock lock(world_->mutex(), std::try_to_lock);
        if (lock && !world_->failed()) report_missing();
    }

    /// Ends the world, and tells the other ranks.
    [[gnu::cold]] void fail(const Failure& failure) noexcept override {
        world_->fail(failure);
        {
            // The buffers may be freed soon, so nothing may write into them from now on, except into lent memory.
            const std::lock_guard lock(world_->mutex());
            ended_ = true;
        }
        world_->deliver(timeout());
    }

    /// Returns memory for messages without a copy. If a message may still be written into it,
    /// it stays until the process ends.
    collective::Memory allocate(std::size_t bytes) override {
        return bytes == 0 ? collective::Memory() : lend(collective::memory_of(kernel::HostBuffer(bytes)), bytes);
    }
    /// The same for `bytes` bytes of existing memory. While the result lives, messages use it without a copy.
    [[gnu::cold]] collective::Memory lend(collective::Memory memory, std::size_t bytes) {
        void* const data = memory.data();
        known_->add(data, bytes);
        const auto take_back = [world = world_, known = known_, memory = std::move(memory), bytes](void* lent) {
            known->remove(lent);
            if (world->failed() && !world->release(lent, bytes)) leak_until_exit(memory);
        };
        return Shared<void>::of(data, take_back);
    }

    [[gnu::cold]] Shared<collective::Engine> split(const collective::Group& group) override {
        // Two communicators that share a rank get different numbers, because each rank's numbers only grow. (A rank
        // makes one split at a time, see the concept.)
        int number = 0;
        for (const int proposal : exchange(world_->next_communicator.load())) number = larger(number, proposal);
        if (number < 0 || number >= world_->transport().last_stream() / Route::streams)
            detail::refuse({"split", own_world_rank()}, number,
                           " communicators were made; the transport has no room for more");
        auto made = Shared<MessageEngine>::make(world_, world_ranks_of(group), group.rank, number, known_, timeout());
        world_->next_communicator = number + 1;
        return made;
    }

private:
    /// Waits until collective n is complete; with `left`, until it has also left `pending_`.
    void wait_for(std::uint64_t n, bool left) {
        const auto over = [&] { return left ? pending_.is_over(n) : is_complete(n); };
        int looks = world_->cores_are_shared ? 1 : 16;  // first looks, without a pause
        wait_until(
            [&]() -> std::optional<Call> {
                std::lock_guard lock(world_->mutex());
                if (over()) return std::nullopt;
                const bool may_advance = world_->transport().refusal() == nullptr;
                // A message often arrives faster than the mutex can be released and locked.
                do {
                    if (may_advance) advance();
                    if (over()) return std::nullopt;
                } while (--looks > 0 && !world_->failed());
                return pending(n).call();
            },
            [&](collective::Deadline& deadline) {
                std::lock_guard lock(world_->mutex());
                if (!over() && !world_->failed()) look(deadline);  // another thread may have advanced meanwhile
            });
    }

    /// Bytes of data that a hello carries: as many as cost no more than another round trip. With two ranks, some
    /// operations send no more this way than as a share and its result.
    static constexpr std::size_t hello_room(std::size_t ranks, Operation operation) noexcept {
        const bool no_more = ranks == 2 && (operation == Operation::all_reduce || operation == Operation::broadcast ||
                                            operation == Operation::all_gather);
        return (no_more ? 128 : 32) * 1024 / ranks / 64 * 64;
    }

    // All functions below require the world's mutex, unless stated otherwise.

    PendingCollective& pending(std::uint64_t n) noexcept { return *pending_[n]; }
    bool is_complete(std::uint64_t n) noexcept { return pending_.is_over(n) || pending(n).complete(); }

    /// The first incomplete collective, or the last one. There must be one.
    PendingCollective& oldest_open() noexcept {
        std::uint64_t n = pending_.first();
        while (n + 1 < pending_.next() && pending(n).complete()) ++n;
        return pending(n);
    }

    std::uint64_t begin(const Call& call) {
        const std::size_t room = hello_room(world_ranks()->size(), call.operation);
        if (spare_.empty())
            spare_.push_back(Shared<PendingCollective>::make(
                route_, hello_room(world_ranks()->size(), Operation::all_reduce), shares_cores_));
        const std::uint64_t added = pending_.add([&](Shared<PendingCollective>& pending, std::uint64_t n) {
            pending = std::move(spare_.back());
            spare_.pop_back();
            try_move([&] { pending->start(n, call, room, *known_); });
        });
        if (!world_->failed()) try_move([this] { open_rounds(); });
        return added;
    }

    void advance_timed() noexcept {
        if (world_->transport().refusal() != nullptr) return;
        const auto begun = Clock::now();
        advance();
        progress_time_.store(progress_time() + (Clock::now() - begun), std::memory_order_relaxed);
    }

    void advance() noexcept {
        if (ended_) return;
        const bool failed = world_->failed();
        try_move([this, failed] {
            if (!failed) world_->poll();
            // Hear even if the world has failed: hellos from before the failure count, and another
            // engine may have received both.
            hear();
            if (!failed) {
                open_rounds();
                rounds_.advance([this] { world_->poll(); }, [](PendingCollective& last) { last.set_computed(); });
            }
            for (std::uint64_t n = pending_.first(); n < pending_.next(); ++n)
                if (PendingCollective& one = pending(n); one.is_leaving()) one.see_off(failed);
            if (!failed) retire();
        });
    }

    template <class F>
    void try_move(F&& move) noexcept {
        try {
            move();
        } catch (const Nonsense& error) {
            world_->fail({Errc::peer_failed, error.rank, error.what()});
        } catch (const std::bad_alloc&) {
            world_->fail({Errc::peer_failed, own_world_rank(), "out of memory"});  // a text that needs none
        } catch (const CallFailed& error) {
            find_dead();
            fail_transport(error);
        } catch (const std::exception& error) {
            fail_transport(error);
        }
    }

    /// Finds out which ranks have started which collectives.
    void hear() {
        for (; heard_ < pending_.next(); ++heard_) {
            PendingCollective& next = pending(heard_);
            if (!next.accepted()) {
                if (!next.hear()) return;
                if (const int r = collective::first_misfit(next.calls()); r >= 0) {
                    world_->fail(collective::mismatch(heard_, next.calls(), r, *world_ranks()));
                    return;
                }
                next.accept();
                if (!next.small()) next.answer();
            }
            if (!next.is_all_here()) return;
            if (next.computed()) continue;
            if (next.small()) next.finish_small(combiner_, inputs_);
            else if (rounds_.none_for(next)) next.set_computed();
        }
    }

    void open_rounds() {
        for (; opening_ < pending_.next(); ++opening_) {
            PendingCollective& next = pending(opening_);
            if (!next.small() && (!next.whole_is_known() || !rounds_.open(next))) return;
        }
    }

    void retire() {
        pending_.retire([this](Shared<PendingCollective>& oldest) {
            const std::uint64_t n = oldest->number();
            if (n >= heard_ || n >= opening_ || !oldest->is_over()) return false;
            spare_.push_back(std::move(oldest));
            return true;
        });
    }

    void look(collective::Deadline& deadline) {
        deadline.look(
            timeout(),
            [&](std::chrono::nanoseconds by) {
                detector_.report_timeout(oldest_open(), heard_ < pending_.next() ? &pending(heard_) : nullptr, by,
                                         timeout());
            },
            [&] { report_missing(); }, world_->moved);
    }

    [[gnu::cold]] void report_missing() {
        if (pending_.empty()) return;
        detector_.report_missing(oldest_open());
        if (world_->is_asked()) detector_.answer(detector_.late(oldest_open()));
    }

    /// A failed call is often the first sign that another process has died. Looks for one, and listens to the others,
    /// for up to a second.
    [[gnu::cold]] void find_dead() noexcept {
        const auto deadline = Clock::now() + std::chrono::seconds(1);
        for (; !world_->failed() && Clock::now() < deadline; ::usleep(1'000)) {
            if (const int dead = detector_.first_dead(); dead >= 0)
                world_->fail(world_->end_of(
                    dead, pending_.empty() ? "a collective"
                                           : collective::name_of(oldest_open().call(), oldest_open().number())));
            try {
                world_->poll();
            } catch (const std::exception&) {
                // The same call may fail again: ignore it.
            }
        }
    }

    [[gnu::cold]] void fail_transport(const std::exception& error) noexcept {
        const int self = own_world_rank();
        world_->fail({Errc::peer_failed, self, text("rank ", self, " cannot communicate: ", error.what())});
    }

    /// Keeps memory that a message may still be written into.
    [[gnu::cold]] void give_up() noexcept {
        bool all = world_->transport().refusal() == nullptr;
        if (all) {
            for (std::uint64_t n = pending_.first(); n < pending_.next(); ++n) all &= pending(n).give_up();
            all &= rounds_.give_up();
        }
        if (all) return;
        for (std::uint64_t n = pending_.first(); n < pending_.next(); ++n) leak_until_exit(pending_[n]);
        leak_until_exit(Shared<Rounds>::make(std::move(rounds_)));
    }

    const Shared<MessageWorld> world_;
    const Shared<KnownMemory> known_;
    const Route route_;
    /// Do these ranks run on one machine with fewer cores than ranks? The same on all of them.
    const bool shares_cores_ = world_->share_cores(*world_ranks());
    bool ended_ = false;

    collective::InFlight<Shared<PendingCollective>> pending_{slots};
    List<Shared<PendingCollective>> spare_;
    std::uint64_t heard_ = 0;    ///< all ranks are known to have started all collectives below
    std::uint64_t opening_ = 0;  ///< all rounds of all collectives below are open or done

    collective::Combiner combiner_{world_ranks()->size()};
    List<const void*> inputs_;
    Rounds rounds_{route_, combiner_};
    MessageFailureDetector detector_{*world_, *this, route_.communicator, rounds_};
    std::atomic<std::chrono::nanoseconds> progress_time_{std::chrono::nanoseconds::zero()};
};

}  // namespace gradsync::inline v0_2::message_passing
