// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <utility>

#include "../core/backend_clock.hpp"
#include "../observe/observer.hpp"

namespace gradsync::inline v0_2::detail {

/// Adds up the time by which a step was held up, by however many of its threads at once: a moment counts once, so that
/// the sum is never more than the time that went by. For any thread.
class Exposure {
public:
    using Clock = std::chrono::steady_clock;

    /// A thread was held up from `begin` to `end`. Of a span that began before the last one added but ended after it, what
    /// lay before that one's end is taken to have been counted.
    void add(Clock::time_point begin, Clock::time_point end) noexcept {
        const Clock::rep from = begin.time_since_epoch().count(), to = end.time_since_epoch().count();
        Clock::rep counted = counted_until_.load(std::memory_order_relaxed);
        do {
            if (to <= counted) return;
        } while (!counted_until_.compare_exchange_weak(counted, to, std::memory_order_relaxed));
        sum_.fetch_add(to - (from < counted ? counted : from), std::memory_order_relaxed);
    }

    /// The sum since the last call.
    Clock::duration take() noexcept { return Clock::duration(sum_.exchange(0, std::memory_order_relaxed)); }

private:
    std::atomic<Clock::rep> counted_until_{0};
    std::atomic<Clock::rep> sum_{0};
};

/// A stopwatch on the backend's clock: adds up what holds a step up, and how long something was on its way, each moment once; and tells
/// the observer, if there is one. For any thread.
template <class B>
class Watch {
public:
    using Time = Observer::Time;

    /// Both outlive this; `observer` may be null.
    Watch(const B& backend, Observer* observer) noexcept : backend_(backend), observer_(observer) {}

    Time now() const { return backend_now(backend_); }
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

    /// A bucket was started at that time and is on its way (`collective`, `gather`).
    void depart(Activity activity, std::size_t index, Time at) noexcept {
        {
            std::lock_guard lock(lock_);
            // Others may have arrived since `at`, seen by another thread: that time is counted.
            if (under_way_++ == 0 && counted_until_ < at) counted_until_ = at;
        }
        begin(activity, index, at);
    }
    /// It has arrived: now, which is what is returned.
    Time arrive(Activity activity, std::size_t index) {
        const Time at = leave();
        end(activity, index, at);
        return at;
    }

    /// The step was held up.
    void add(Time begin, Time end) noexcept { exposure_.add(begin, end); }

    /// An activity, until the end of this or `end()`.
    class [[nodiscard]] Span {
    public:
        Span(Watch& watch, Activity activity, std::size_t index, Time begin, bool held) noexcept
            : watch_(watch), activity_(activity), index_(index), begin_(begin), held_(held) {
            watch_.begin(activity_, index_, begin_);
        }
        Span(const Span&) = delete;
        Span& operator=(const Span&) = delete;
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
    /// It holds the step up.
    Span hold(Activity activity, std::size_t index = Observer::no_index) { return hold_since(now(), activity, index); }
    Span hold_since(Time begin, Activity activity, std::size_t index = Observer::no_index) {
        return Span(*this, activity, index, begin, true);
    }
    /// It does not, or what does is counted elsewhere.
    Span tell(Activity activity, std::size_t index, Time begin) { return Span(*this, activity, index, begin, false); }

    /// Seconds by which the step was held up since the last call.
    double take_exposed_seconds() noexcept { return seconds(exposure_.take()); }
    /// Seconds since the last call in which something was on its way.
    double take_covered_seconds() {
        std::lock_guard lock(lock_);
        if (under_way_ != 0) count_until(now());
        return seconds(std::exchange(covered_, {}));
    }

private:
    static double seconds(Time::duration d) noexcept { return std::chrono::duration<double>(d).count(); }

    /// One less is under way. The time is read under the lock, or what departs meanwhile would seem to have met what is over.
    Time leave() {
        std::lock_guard lock(lock_);
        const Time at = now();
        if (--under_way_ == 0) count_until(at);
        return at;
    }
    /// Something was on its way until then. Under the lock.
    void count_until(Time at) noexcept {
        covered_ += at - counted_until_;
        counted_until_ = at;
    }

    const B& backend_;
    Observer* observer_;
    Exposure exposure_;
    std::mutex lock_;
    std::size_t under_way_ = 0;
    Time counted_until_{};      ///< before that, every moment is counted in which something was under way
    Time::duration covered_{};  ///< their sum
};

}  // namespace gradsync::inline v0_2::detail
