// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>

#include "../core/clock.hpp"

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

}  // namespace gradsync::inline v0_2::detail
