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

/// Virtual time. Every rank has a thread and a clock of its own; one of them runs at a time, and goes on until what it asks
/// depends on others. Then it is the turn of the rank whose clock shows least, in the order in which they gave up their
/// turns where several show the same. So what happens is the same in every run, and ranks need no locks against one
/// another.
///
/// Beside ranks there are events, which happen when no rank is left whose clock shows less.
///
/// Everything is called with the lock held that `lock()` gives; a rank's functions from its own thread.
class Scheduler {
public:
    using Lock = std::unique_lock<std::mutex>;

    /// Rank 0 has its turn first.
    explicit Scheduler(int ranks) : ranks_(static_cast<std::size_t>(ranks)) {
        for (int r = 1; r < ranks; ++r) make_ready(r);
        ranks_[0].state = State::running;
        running_ = 0;
    }

    Lock lock() { return Lock(mutex_); }

    /// The calling thread is that of `rank`; returns when it has its turn.
    void enter(Lock& lock, int rank) {
        Rank& self = at(rank);
        self.thread = std::this_thread::get_id();
        take_turn(lock, rank);
    }
    /// It is the last that this thread does; its turn passes on.
    void leave(int rank) {
        at(rank).state = State::gone;
        at(rank).thread = {};
        pass_on();
    }
    bool is_thread_of(int rank) const { return ranks_[static_cast<std::size_t>(rank)].thread == std::this_thread::get_id(); }

    double now(int rank) const { return ranks_[static_cast<std::size_t>(rank)].clock; }
    /// Nothing of what others do shows before the rank asks for it.
    void advance_to(int rank, double time) {
        if (time > at(rank).clock) at(rank).clock = time;
    }

    /// `happen` runs when no rank that may still act has a clock that shows less than `time`.
    void add_event(double time, std::function<void()> happen) { events_.push({time, ++sequence_, std::move(happen)}); }

    /// Lets events happen that are due by this rank's clock, as far as no other rank is behind them. True if none of them is
    /// left, and all other ranks are later than this one: then nothing can become known before its clock moves.
    bool settle(int rank) {
        const double time = now(rank);
        for (;;) {
            const double others = ready_.empty() ? endless : ready_.top().time;
            if (events_.empty() || events_.top().time > time) return others > time;
            if (events_.top().time > others) return false;
            happen();
        }
    }

    /// Lets everybody else go first whose clock shows no more than this rank's.
    void yield(Lock& lock, int rank) {
        make_ready(rank);
        pass_on();
        take_turn(lock, rank);
    }

    /// Sleeps until somebody calls `wake`.
    void block(Lock& lock, int rank) {
        at(rank).state = State::blocked;
        ++blocked_;
        pass_on();
        take_turn(lock, rank);
    }

    /// Whose turn it is, -1: nobody's; and how many turns there have been.
    int running() const { return running_; }
    std::uint64_t turn() const { return turn_; }
    bool is_blocked(int rank) const { return ranks_[static_cast<std::size_t>(rank)].state == State::blocked; }

    /// The rank may go on, not before this time.
    void wake(int rank, double time) {
        if (!is_blocked(rank)) return;
        --blocked_;
        advance_to(rank, time);
        make_ready(rank);
    }
    void wake_all() {
        for (std::size_t r = 0; r < ranks_.size(); ++r) wake(static_cast<int>(r), 0);
    }

    /// What to do where everybody who is left waits for somebody else; has to wake one at least.
    void on_deadlock(std::function<void()> resolve) { resolve_ = std::move(resolve); }

    /// Later than anything.
    static constexpr double endless = 1e300;

private:
    enum class State : std::uint8_t { ready, running, blocked, gone };

    struct Rank {
        std::condition_variable turn;
        std::thread::id thread;
        double clock = 0;
        State state = State::ready;
    };
    template <class What>
    struct Entry {
        double time;
        std::uint64_t sequence;
        What what;

        friend bool operator>(const Entry& a, const Entry& b) noexcept {
            return std::tie(a.time, a.sequence) > std::tie(b.time, b.sequence);
        }
    };
    template <class What>
    using Earliest = std::priority_queue<Entry<What>, std::vector<Entry<What>>, std::greater<>>;

    Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

    void make_ready(int rank) {
        at(rank).state = State::ready;
        ready_.push({at(rank).clock, ++sequence_, rank});
    }

    void happen() {
        const std::function<void()> event = events_.top().what;
        events_.pop();
        event();
    }

    /// Nobody has the turn: gives it to whoever is next.
    void pass_on() {
        running_ = -1;
        for (;;) {
            const double event = events_.empty() ? endless : events_.top().time;
            const double rank = ready_.empty() ? endless : ready_.top().time;
            if (event < endless && event <= rank) {
                happen();
            } else if (!ready_.empty()) {
                const int next = ready_.top().what;
                ready_.pop();
                at(next).state = State::running;
                running_ = next;
                ++turn_;
                at(next).turn.notify_one();
                return;
            } else if (blocked_ != 0 && resolve_) {
                resolve_();
            } else {
                return;
            }
        }
    }

    void take_turn(Lock& lock, int rank) {
        Rank& self = at(rank);
        self.turn.wait(lock, [&] { return self.state == State::running; });
    }

    std::mutex mutex_;
    std::vector<Rank> ranks_;
    Earliest<int> ready_;
    Earliest<std::function<void()>> events_;
    std::uint64_t sequence_ = 0;
    int blocked_ = 0;
    int running_ = -1;
    std::uint64_t turn_ = 0;
    std::function<void()> resolve_;
};

}  // namespace gradsync::inline v0_2::simulation
