#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <utility>
#include <vector>

#include "../core/backend.hpp"
#include "../core/clock.hpp"
#include "../observe/statistics.hpp"

namespace gradsync::inline v0::detail {

/// The collectives of one step's buckets: started in order, seen to complete in order, with their times.
/// `start` is for one thread at a time; so are `poll` and `wait`; the two may be different threads.
template <Work W>
class Flight {
public:
    using Clock = std::chrono::steady_clock;

    explicit Flight(std::size_t buckets) : works_(buckets), launches_(buckets), ends_(buckets) {}

    std::size_t size() const noexcept { return works_.size(); }
    std::size_t started() const noexcept { return started_.load(std::memory_order_acquire); }
    std::size_t completed() const noexcept { return completed_.load(std::memory_order_acquire); }
    bool in_flight() const noexcept { return completed() < started(); }

    /// The next bucket's collective, started at `when`.
    void start(W work, Clock::time_point when) noexcept {
        const std::size_t b = started_.load(std::memory_order_relaxed);
        works_[b] = std::move(work);
        launches_[b] = when;
        started_.store(b + 1, std::memory_order_release);
    }

    /// Advances, never blocks.
    void poll() {
        for (std::size_t b = completed(); b < started() && works_[b].test(); ++b) complete(b);
    }

    /// Returns when bucket b's collective is complete; b is the first that was not known to be.
    void wait(std::size_t b) {
        works_[b].wait();
        complete(b);
    }

    /// For a new plan; nothing is in flight.
    void resize(std::size_t buckets) {
        works_.resize(buckets);
        launches_.resize(buckets);
        ends_.resize(buckets);
    }

    /// Forgets the step, which is complete.
    void reset() noexcept {
        started_.store(0, std::memory_order_relaxed);
        completed_.store(0, std::memory_order_relaxed);
    }

    /// The time while at least one collective was in flight.
    Clock::duration covered() const noexcept {
        Clock::duration sum{};
        Clock::time_point until{};
        for (std::size_t b = 0; b < size(); ++b) {
            const Clock::time_point begin = std::max(launches_[b], until);
            if (ends_[b] > begin) sum += ends_[b] - begin;
            until = std::max(until, ends_[b]);
        }
        return sum;
    }

    /// Seconds since the first start.
    double launch_seconds(std::size_t b) const noexcept { return seconds(launches_[b] - launches_[0]); }
    double end_seconds(std::size_t b) const noexcept { return seconds(ends_[b] - launches_[0]); }

    static double seconds(Clock::duration d) noexcept { return std::chrono::duration<double>(d).count(); }

private:
    void complete(std::size_t b) noexcept {
        ends_[b] = Clock::now();
        completed_.store(b + 1, std::memory_order_release);
    }

    std::vector<W> works_;
    std::vector<Clock::time_point> launches_;
    std::vector<Clock::time_point> ends_;
    std::atomic<std::size_t> started_{0};
    std::atomic<std::size_t> completed_{0};
};

}  // namespace gradsync::inline v0::detail
