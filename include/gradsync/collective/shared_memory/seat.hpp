// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <optional>

#include "board.hpp"

namespace gradsync::inline v0_2::shared_memory {

using collective::Failure;

/// How a rank reads the addresses in another rank's calls: `publish` turns a call of this rank into one that others can
/// read, `resolve` a published one into addresses that are valid here. `keeps_memory`: does memory that one rank works
/// on stay mapped when another rank releases it? This is for ranks that are threads of one process.
struct OneAddressSpace {
    static Call publish(const Call& call) noexcept { return call; }
    static Call resolve(const Call& call) noexcept { return call; }
    static constexpr bool keeps_memory = false;
};

/// One rank's place at a board: starts collectives, works on them, waits for them.
///
/// Several threads of the rank may use it: their starts are serialised, and one of them works at a time. Nothing runs
/// by itself: work is done inside `progress()`, `test()` and `wait()`.
template <class Space>
class Seat : public collective::Member {
public:
    Seat(Shared<Board> board, int rank, std::chrono::nanoseconds timeout, Space space = {})
        : Member(board->world_ranks(), rank, timeout), space_(std::move(space)), board_(std::move(board)) {}
    ~Seat() { leave(); }

    Board& board() const noexcept { return *board_; }
    World& world() const noexcept { return board_->world(); }
    /// Tells the others that this rank starts nothing more.
    void leave() noexcept {
        board_->presence(rank()).left.store(true, std::memory_order_release);
        board_->world().wait_queue.ring();
    }

    /// Publishes this rank's part of its next collective and returns the collective's number. Waits only if
    /// `Board::slots` collectives are in flight. Throws Error if the world has failed. `step`: this rank's step in a
    /// `reduce_step`; must outlive the collective.
    std::uint64_t start(const Call& call, ShardStep* step = nullptr) {
        if (board_->world().failed()) throw_failure(call.operation);
        lock();
        while (next_.load(std::memory_order_relaxed) - min_retired() >= Board::slots) {
            unlock();
            const std::uint64_t oldest = next_.load(std::memory_order_relaxed) - Board::slots;
            if (!wait_for(oldest, Until::retired)) throw_failure(call.operation);
            lock();
        }
        const std::uint64_t n = next_.load(std::memory_order_relaxed);
        Board::Cell& cell = board_->cell(n, rank());
        cell.call = space_.publish(call);
        Board::Share& share = board_->share(n, rank());
        steps_[n % Board::slots] = step;
        share.next.store(0, std::memory_order_relaxed);
        share.chunks_done.store(0, std::memory_order_relaxed);
        cell.arrived.store(n + 1, std::memory_order_release);
        next_.store(n + 1, std::memory_order_release);
        unlock();
        board_->world().wait_queue.ring();
        return n;
    }

    /// Works on this rank's share of the collectives that every rank has started. Never blocks.
    void progress() noexcept { work(Mode::poll); }

    /// Reads the calls of all complete collectives, for `done`. Unlike after `progress`, they are read even if another
    /// thread of this rank is working.
    void catch_up() noexcept {
        while (board_->done(own_.load(std::memory_order_acquire))) {
            work(Mode::poll);
            ::sched_yield();
        }
    }

    /// The time that this rank has spent on work outside of waits.
    std::chrono::nanoseconds progress_time() const noexcept { return progress_time_.load(std::memory_order_relaxed); }

    /// Makes progress, and returns true if collective n is complete. Throws Error if it is
    /// not and the world has failed.
    bool test(std::uint64_t n) {
        if (board_->done(n)) return true;
        work(Mode::poll);
        if (board_->done(n)) return true;
        if (!board_->world().failed()) return false;
        if (board_->done(n)) return true;  // look again: the failed rank may have seen it complete
        throw_failure(board_->cell(n, rank()).call.operation);
    }

    /// The ranks that hold up collective n.
    collective::Late late(std::uint64_t n) const { return detector_.late(n); }

    /// Is collective n complete, and has this rank read its calls? Does no work.
    bool done(std::uint64_t n) const noexcept { return board_->done(n) && own_.load(std::memory_order_acquire) > n; }

    /// Returns when collective n is complete. Throws Error if the world fails or the time limit is reached.
    void wait(std::uint64_t n) {
        if (!await(n)) throw_failure(board_->cell(n, rank()).call.operation);
    }
    /// The same, but returns false instead of throwing. `whole`: the collective of another seat that n is a piece of,
    /// if any; every rank has started it.
    bool await(std::uint64_t n, const Whole* whole = nullptr) {
        if (!board_->done(n) && !wait_for(n, Until::done, whole)) return false;
        // Others can reuse a slot only once every rank has retired it, so this rank must not fall behind.
        if (next_.load(std::memory_order_relaxed) - oldest_.load(std::memory_order_relaxed) > Board::slots / 4)
            work(Mode::wait);
        return true;
    }

    /// The checks of a wait for collective n, for callers that test repeatedly.
    void look(std::uint64_t n, collective::Deadline& deadline, const Whole* whole = nullptr) noexcept {
        if (board_->done(n) || board_->world().failed()) return;
        const std::uint64_t unstarted = smaller(n, own_.load(std::memory_order_relaxed));
        deadline.look(
            timeout(),
            [&](std::chrono::nanoseconds by) { detector_.report_timeout(unstarted, whole, deadline, by, timeout()); },
            [&] { detector_.report_dead(unstarted, n, whole); }, board_->world().moved);
        detector_.report_leavers(unstarted, whole);
    }

    /// The elements of collective n's whole buffer if ranks only synchronised in it, because not all buffers were
    /// reachable. Call it when n is `done`, before `Board::slots` more collectives have started.
    std::optional<std::size_t> elsewhere(std::uint64_t n) const noexcept { return elsewhere_[n % Board::slots]; }

    /// Declares that nobody will wait for collective n, and that its buffers may be freed soon.
    void abandon(std::uint64_t n) noexcept {
        if (!board_->done(n)) fail(collective::abandoned(detector_.name(n), own_world_rank(), flights()));
    }

    /// Ends the world, unless it has ended, and returns once no rank touches another's buffers.
    void fail(Failure failure) noexcept {
        board_->world().fail(std::move(failure));
        quiesce();
    }

    /// Throws the world's failure as seen from this rank, once no other rank touches this rank's buffers.
    [[noreturn]] void throw_failure(Operation operation) {
        quiesce();
        collective::raise_failure(board_->world().failure(), operation, own_world_rank(), flights());
    }

private:
    void lock() noexcept {
        while (locked_.exchange(true, std::memory_order_acquire)) ::sched_yield();
    }
    void unlock() noexcept { locked_.store(false, std::memory_order_release); }

    std::uint64_t min_retired() noexcept {
        const std::uint64_t next = next_.load(std::memory_order_relaxed);
        if (next - min_retired_.load(std::memory_order_relaxed) < Board::slots)
            return min_retired_.load(std::memory_order_relaxed);
        std::uint64_t least = next;
        for (int r = 0; r < board_->size(); ++r)
            if (!board_->presence(r).left.load(std::memory_order_acquire))  // a rank that left reads no slot again
                least = smaller(least, board_->presence(r).retired.load(std::memory_order_acquire));
        min_retired_.store(least, std::memory_order_relaxed);
        return least;
    }

    enum class Mode {
        poll,  ///< this rank's shares; the time counts as progress_time()
        wait,  ///< this rank's shares
        help,  ///< shares of late ranks too
    };

    /// The only function that works on chunks. Only reads if there is nothing to do.
    void work(Mode mode) noexcept {
        const std::uint64_t next = next_.load(std::memory_order_acquire);
        const std::uint64_t oldest = oldest_.load(std::memory_order_relaxed);
        if (oldest == next || !(has_work(next, mode) || board_->done(oldest))) return;
        if (working_.exchange(true, std::memory_order_acquire)) return;  // another thread of this rank is working
        if (has_work(next, mode)) {
            std::atomic<int>& busy = board_->presence(rank()).busy;
            // Pairs with quiesce(): either it sees this rank busy, or this rank sees that the world has failed.
            busy.store(1, std::memory_order_seq_cst);
            if (mode == Mode::poll) {
                const auto begin = std::chrono::steady_clock::now();
                work_own_shares(next);
                progress_time_.store(progress_time() + (std::chrono::steady_clock::now() - begin),
                                     std::memory_order_relaxed);
            } else {
                work_own_shares(next);
                if (mode == Mode::help) work_other_shares();
            }
            busy.store(0, std::memory_order_release);
        }
        retire();
        working_.store(false, std::memory_order_release);
    }

    bool has_work(std::uint64_t next, Mode mode) noexcept {
        const std::uint64_t own = own_.load(std::memory_order_relaxed);
        return (own < next && board_->all_arrived(own)) ||
               (mode == Mode::help && others_.load(std::memory_order_relaxed) < own);
    }

    void work_own_shares(std::uint64_t next) noexcept {
        const World& world = board_->world();
        std::uint64_t n = own_.load(std::memory_order_relaxed);
        // After a failure no more work begins, but a caller may still ask for complete collectives.
        for (; n < next && board_->all_arrived(n) && (!world.failed() || board_->done(n)); ++n) {
            collect_calls(n);
            if (const int r = first_misfit(calls_); r >= 0)
                return board_->world().fail(collective::mismatch(n, calls_, r, *world_ranks()));
            const Chunks chunks = chunks_of(n);
            settle_empty_shares(n, chunks);
            if (!world.cores_are_shared || calls_[0].operation == Operation::reduce_step) {
                work_share(n, chunks, rank());
            } else {
                // Shares then belong to cores: a rank on a core finds in its cache what the last one on it has read.
                for (int r = collective::current_core(rank()) % world.cores; r < board_->size(); r += world.cores)
                    work_share(n, chunks, r);
                // Polling ranks may all run on one core, so each share also has a rank that works on it.
                work_share(n, chunks, rank());
            }
            own_.store(n + 1, std::memory_order_release);
        }
    }

    void work_other_shares() noexcept {
        std::uint64_t n = others_.load(std::memory_order_relaxed);
        for (const std::uint64_t end = own_.load(std::memory_order_relaxed); n < end;
             others_.store(++n, std::memory_order_relaxed)) {
            if (board_->done(n)) continue;
            collect_calls(n);
            if (calls_[0].operation == Operation::reduce_step) continue;  // each rank has its own step
            const Chunks chunks = chunks_of(n);
            for (int k = 1; k <= board_->size(); ++k) {
                if (board_->world().failed()) return;
                work_share(n, chunks, (rank() + k) % board_->size());
            }
        }
    }

    void collect_calls(std::uint64_t n) noexcept {
        for (int r = 0; r < board_->size(); ++r) calls_[r] = space_.resolve(board_->cell(n, r).call);
    }

    Chunks chunks_of(std::uint64_t n) noexcept {
        bool elsewhere = false;
        for (const Call& call : calls_) elsewhere |= call.elsewhere;
        elsewhere_[n % Board::slots] = elsewhere ? std::optional(whole_count(calls_)) : std::nullopt;
        return elsewhere ? Chunks() : Chunks(calls_);
    }

    /// The first rank that finds a collective completes the shares without work, so that no
    /// rank waits for their owners.
    void settle_empty_shares(std::uint64_t n, const Chunks& chunks) noexcept {
        bool settled = false;
        for (int r = 0; r < board_->size(); ++r) {
            std::atomic<std::uint64_t>& done = board_->share(n, r).done;
            if (chunks.chunks_in(r) != 0 || done.load(std::memory_order_relaxed) > n) continue;
            done.store(n + 1, std::memory_order_release);
            settled = true;
        }
        if (settled) board_->world().wait_queue.ring();
    }

    /// Takes chunks of `owner`'s share until none is left.
    void work_share(std::uint64_t n, const Chunks& chunks, int owner) noexcept {
        Board::Share& share = board_->share(n, owner);
        const std::uint32_t end = chunks.chunks_in(owner);
        std::uint32_t worked = 0;
        while (share.next.load(std::memory_order_relaxed) < end && !board_->world().failed()) {
            const std::uint32_t c = share.next.fetch_add(1, std::memory_order_relaxed);
            if (c >= end) break;
            try {
                worker_.run(calls_, owner, chunks.chunk(owner, c), steps_[n % Board::slots]);
            } catch (...) {  // thrown by a step
                const int self = own_world_rank();
                return board_->world().fail(
                    {Errc::peer_failed, self,
                     collective::text("rank ", self, " failed in the step of its shard: ", detail::handled().what)});
            }
            ++worked;
        }
        if (worked == 0) return;
        // A rank that has worked on all of it need not ask whether others are done.
        if (worked == end || share.chunks_done.fetch_add(worked, std::memory_order_acq_rel) + worked == end)
            board_->set_share_done(n, owner);
    }

    void retire() noexcept {
        const std::uint64_t end = own_.load(std::memory_order_relaxed);
        std::uint64_t n = oldest_.load(std::memory_order_relaxed);
        const std::uint64_t before = n;
        while (n < end && board_->done(n)) ++n;
        if (n == before) return;
        if (others_.load(std::memory_order_relaxed) < n) others_.store(n, std::memory_order_relaxed);
        oldest_.store(n, std::memory_order_relaxed);
        board_->presence(rank()).retired.store(n, std::memory_order_release);
    }

    enum class Until { done, retired };

    /// Works and waits until collective n is done, or retired by all ranks. Returns false if the world fails first.
    bool wait_for(std::uint64_t n, Until until, const Whole* whole = nullptr) {
        const auto complete = [&] { return until == Until::done ? board_->done(n) : min_retired() > n; };
        World& world = board_->world();
        collective::Backoff backoff(world.cores_are_shared);
        collective::Deadline deadline;
        // Taking over a share costs its owner more than the help is worth, unless the owner is really late. An owner
        // that may be waiting for this very core is late.
        int rounds_alone = world.cores_are_shared ? 0 : 300;
        for (;;) {
            work(rounds_alone > 0 ? Mode::wait : Mode::help);
            if (complete()) return true;
            if (world.failed()) return complete();  // look again: the failed rank may have seen it complete
            if (rounds_alone > 0) {
                --rounds_alone;
                continue;  // no pause: it takes as long as a handoff between cores
            }
            if (backoff.patient()) {
                world.advance_hooks();
                if (until == Until::retired && board_->done(n)) look_for_holders(n, deadline);
                else look(n, deadline, whole);
            }
            backoff.wait_a_little(world.wait_queue, [&] {
                const std::uint64_t own = own_.load(std::memory_order_relaxed);
                return complete() || world.failed() || (own <= n && board_->all_arrived(own));
            });
        }
    }

    /// For a collective n that is complete, but not retired by all ranks.
    [[gnu::cold]] void look_for_holders(std::uint64_t n, collective::Deadline& deadline) noexcept {
        deadline.look(
            timeout(), [&](std::chrono::nanoseconds) { detector_.report_holders(n, timeout()); },
            [&] { detector_.report_holders(n, std::chrono::nanoseconds::zero()); }, board_->world().moved);
    }

    /// After the world has failed: waits until no rank touches another rank's buffers. The wait is bounded, because the
    /// caller may be a destructor. One deadline serves all calls, of which there may be many. Chunks take microseconds,
    /// or as long as an optimizer needs for them, so the deadline passes only if a rank was stopped for good. If memory
    /// stays mapped, such a rank does no harm when it continues.
    void quiesce() noexcept {
        using Clock = std::chrono::steady_clock;
        const std::chrono::nanoseconds second = std::chrono::seconds(1),
                                       limit = Space::keeps_memory ? second : larger(timeout(), second);
        Clock::rep none = 0;
        const Clock::time_point now = Clock::now();
        quiet_by_.compare_exchange_strong(none, (now + limit).time_since_epoch().count(), std::memory_order_relaxed);
        const Clock::time_point deadline{Clock::duration(quiet_by_.load(std::memory_order_relaxed))};
        for (int r = 0; r < board_->size(); ++r)
            while (board_->presence(r).busy.load(std::memory_order_seq_cst) != 0 &&
                   board_->world().alive(board_->world_rank(r)) && Clock::now() < deadline)
                ::sched_yield();
    }

    const Space space_;
    Shared<Board> board_;
    const BoardFailureDetector detector_{*board_, rank()};

    // For starts: requires the lock.
    std::atomic<bool> locked_{false};
    std::atomic<std::uint64_t> next_{0};         ///< number of the next collective
    std::atomic<std::uint64_t> min_retired_{0};  ///< all ranks had retired the collectives below at the last look

    // For work: written by the thread that holds working_. Others also read own_ and oldest_.
    alignas(64) std::atomic<bool> working_{false};
    std::atomic<std::uint64_t> own_{0};     ///< this rank has worked on its share of all collectives below
    std::atomic<std::uint64_t> others_{0};  ///< no rank's share of any collective below has chunks left
    std::atomic<std::uint64_t> oldest_{0};  ///< all collectives below are complete
    std::atomic<std::chrono::nanoseconds> progress_time_{std::chrono::nanoseconds::zero()};
    /// Latest time at which a failed world counts as quiet; 0: not failed.
    std::atomic<std::chrono::steady_clock::rep> quiet_by_{0};
    List<Call> calls_ = List<Call>(static_cast<std::size_t>(board_->size()));
    std::array<std::optional<std::size_t>, Board::slots> elsewhere_{};
    std::array<ShardStep*, Board::slots> steps_{};  ///< of this rank
    ChunkWorker worker_{calls_.size()};
};

}  // namespace gradsync::inline v0_2::shared_memory
