// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <queue>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace gradsync::inline v0_2::simulation {

/// Virtual time. Every rank has a thread and a clock of its own. One rank runs at a time, until its next call depends on others. Then the
/// rank with the earliest clock gets the turn; among equal clocks, the one that gave up its turn first. So every run goes the same way, and
/// ranks need no locks against each other.
///
/// There are also events, which happen when no rank that may still act has an earlier clock.
///
/// All calls need the lock from `lock()`. The functions of a rank are for its own thread.
class Scheduler {
public:
    using Lock = std::unique_lock<std::mutex>;

    /// Rank 0 has the first turn.
    explicit Scheduler(int ranks) : ranks_(static_cast<std::size_t>(ranks)) {
        for (int r = 1; r < ranks; ++r) make_ready(r);
        ranks_[0].state = State::running;
        running_ = 0;
    }

    Lock lock() { return Lock(mutex_); }

    /// Makes the calling thread that of `rank`; returns when it has its turn.
    void enter(Lock& lock, int rank) {
        Rank& self = at(rank);
        self.thread = std::this_thread::get_id();
        take_turn(lock, rank);
    }
    /// The last call of this thread: passes the turn on.
    void leave(int rank) {
        at(rank).state = State::gone;
        at(rank).thread = {};
        pass_on();
    }
    bool is_thread_of(int rank) const { return ranks_[static_cast<std::size_t>(rank)].thread == std::this_thread::get_id(); }

    double now(int rank) const { return ranks_[static_cast<std::size_t>(rank)].clock; }
    /// Actions of other ranks until then show when the rank asks for them.
    void advance_to(int rank, double time) {
        if (time > at(rank).clock) at(rank).clock = time;
    }

    /// Runs `happen` when no rank that may still act has a clock before `time`.
    void add_event(double time, std::function<void()> happen) { queue_.push({time, ++sequence_, event, std::move(happen)}); }

    /// Runs the events that are due by this rank's clock, unless another rank is behind them. Returns true if none is left and all other
    /// ranks are later: then nothing new can happen before its clock moves.
    bool settle(int rank) {
        while (!queue_.empty() && queue_.top().time <= now(rank)) {
            if (queue_.top().rank != event) return false;
            happen();
        }
        return true;
    }

    /// Gives the turn to all ranks whose clock is not later than this rank's.
    void yield(Lock& lock, int rank) {
        make_ready(rank);
        pass_on();
        take_turn(lock, rank);
    }

    /// Sleeps until another rank or an event calls `wake`.
    void block(Lock& lock, int rank) {
        at(rank).state = State::blocked;
        ++blocked_;
        pass_on();
        take_turn(lock, rank);
    }

    /// The rank that has the turn, or -1; and the number of turns so far.
    int running() const { return running_; }
    std::uint64_t turn() const { return turn_; }
    bool is_blocked(int rank) const { return ranks_[static_cast<std::size_t>(rank)].state == State::blocked; }

    /// Lets a blocked rank go on, no earlier than at `time`. No-op if it is not blocked.
    void wake(int rank, double time) {
        if (!is_blocked(rank)) return;
        --blocked_;
        advance_to(rank, time);
        make_ready(rank);
    }
    void wake_all() {
        for (std::size_t r = 0; r < ranks_.size(); ++r) wake(static_cast<int>(r), 0);
    }

    std::function<void()> on_deadlock;  ///< called when all remaining ranks are blocked; must wake at least one

    /// Later than any time.
    static constexpr double endless = 1e300;

private:
    enum class State : std::uint8_t { ready, running, blocked, gone };

    struct Rank {
        std::condition_variable turn;
        std::thread::id thread;
        double clock = 0;
        State state = State::ready;
    };
    /// A rank that is ready, or an event.
    struct Entry {
        double time;
        std::uint64_t sequence;
        int rank;
        std::function<void()> happen = {};

        /// At the same time, events come before ranks.
        bool operator>(const Entry& other) const noexcept {
            return std::tuple(time, rank != event, sequence) > std::tuple(other.time, other.rank != event, other.sequence);
        }
    };
    static constexpr int event = -1;  ///< the rank of an event

    Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

    void make_ready(int rank) {
        at(rank).state = State::ready;
        queue_.push({at(rank).clock, ++sequence_, rank});
    }

    void happen() {
        const std::function<void()> happen = queue_.top().happen;
        queue_.pop();
        happen();
    }

    /// Gives the turn to the next rank, after the events before it.
    void pass_on() {
        running_ = -1;
        while (queue_.empty() || queue_.top().rank == event) {
            if (!queue_.empty()) happen();
            else if (blocked_ != 0 && on_deadlock) on_deadlock();
            else return;
        }
        running_ = queue_.top().rank;
        queue_.pop();
        ++turn_;
        at(running_).state = State::running;
        at(running_).turn.notify_one();
    }

    void take_turn(Lock& lock, int rank) {
        Rank& self = at(rank);
        self.turn.wait(lock, [&] { return self.state == State::running; });
    }

    std::mutex mutex_;
    std::vector<Rank> ranks_;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue_;  ///< the earliest first
    std::uint64_t sequence_ = 0;
    int blocked_ = 0, running_ = -1;
    std::uint64_t turn_ = 0;
};

}  // namespace gradsync::inline v0_2::simulation
