// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../observe/observer.hpp"

namespace gradsync::inline v0_2::detail {

/// A stopwatch on the backend's clock. It sums up the time that a step was held up, and the time that anything was in
/// flight; overlapping spans count once. It also forwards events to the observer, if there is one. Thread-safe.
class Watch {
public:
    using Time = Observer::Time;

    /// The backend of `clock` and `observer`, which may be null, must outlive this.
    Watch(BackendClock clock, Observer* observer) noexcept : clock_(clock), observer_(observer) {}

    Time now() const { return clock_.now(); }
    Observer* observer() const noexcept { return observer_; }

    void ready(std::size_t parameter) {
        if (observer_ != nullptr) observer_->ready(parameter, now());
    }
    void begin(Activity activity, std::size_t index, Time at) noexcept {
        if (observer_ != nullptr) observer_->begin(activity, index, at);
    }
    void end(Activity activity, std::size_t index, Time at) noexcept {
        if (observer_ != nullptr) observer_->end(activity, index, at);
    }

    /// Records that a bucket was launched at `at` and is in flight (`collective`, `gather`).
    void depart(Activity activity, std::size_t index, Time at) noexcept {
        {
            std::lock_guard lock(lock_);
            // Another thread that saw others arrive may have counted time after `at`.
            if (under_way_++ == 0 && counted_until_ < at) counted_until_ = at;
        }
        begin(activity, index, at);
    }
    /// Records that it has arrived now, and returns the time, which is read under the lock, so that it is ordered with
    /// `depart` in other threads.
    Time arrive(Activity activity, std::size_t index) {
        std::unique_lock lock(lock_);
        const Time at = now();
        if (--under_way_ == 0) count_until(at);
        lock.unlock();
        end(activity, index, at);
        return at;
    }

    /// Counts a span in which any thread of the step was held up. The part before the end
    /// of the last span counts already.
    void add(Time begin, Time end) noexcept {
        const Time::rep from = begin.time_since_epoch().count(), to = end.time_since_epoch().count();
        Time::rep counted = held_until_.load(std::memory_order_relaxed);
        do {
            if (to <= counted) return;
        } while (!held_until_.compare_exchange_weak(counted, to, std::memory_order_relaxed));
        held_.fetch_add(to - (from < counted ? counted : from), std::memory_order_relaxed);
    }

    /// An activity, until `end()` or the end of this object.
    class [[nodiscard]] Span {
    public:
        Span(Watch& watch, Activity activity, std::size_t index, Time begin, bool held) noexcept
            : watch_(watch), activity_(activity), index_(index), begin_(begin), held_(held) {
            watch_.begin(activity_, index_, begin_);
        }
        Span& operator=(Span&&) = delete;
        ~Span() {
            if (!ended_) end(watch_.now());
        }

        void end() { end(watch_.now()); }
        void end(Time at) noexcept {
            ended_ = true;
            if (held_) watch_.add(begin_, at);
            watch_.end(activity_, index_, at);
        }

    private:
        Watch& watch_;
        Activity activity_;
        std::size_t index_;
        Time begin_;
        bool held_;
        bool ended_ = false;
    };
    /// An activity that holds up the step.
    Span hold(Activity activity, std::size_t index = Observer::no_index) { return hold_since(now(), activity, index); }
    Span hold_since(Time begin, Activity activity, std::size_t index = Observer::no_index) {
        return Span(*this, activity, index, begin, true);
    }
    /// An activity that does not hold up the step, or is counted elsewhere.
    Span tell(Activity activity, std::size_t index, Time begin) { return Span(*this, activity, index, begin, false); }

    /// Seconds that the step was held up since the last call.
    double take_exposed_seconds() noexcept {
        return seconds(Time::duration(held_.exchange(0, std::memory_order_relaxed)));
    }
    /// Seconds since the last call in which anything was in flight.
    double take_covered_seconds() {
        std::lock_guard lock(lock_);
        if (under_way_ != 0) count_until(now());
        return seconds(std::exchange(covered_, {}));
    }

private:
    static double seconds(Time::duration d) noexcept { return std::chrono::duration<double>(d).count(); }

    /// Counts the time until `at` as time in flight. Call it under the lock.
    void count_until(Time at) noexcept {
        covered_ += at - counted_until_;
        counted_until_ = at;
    }

    BackendClock clock_;
    Observer* observer_;
    /// Time that the step was held up: end of the counted part, and sum.
    std::atomic<Time::rep> held_until_{0}, held_{0};
    std::mutex lock_;
    std::size_t under_way_ = 0;
    Time counted_until_{};      ///< end of the counted part of the time in flight
    Time::duration covered_{};  ///< total time in flight
};

}  // namespace gradsync::inline v0_2::detail
