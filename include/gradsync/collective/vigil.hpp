// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/clock.hpp"
#include "../core/math.hpp"

namespace gradsync::inline v0_2::collective {

/// What a wait that lasts has to look at: its time limit and, now and then, who is still there. It begins with the first
/// look, so that waits of microseconds read no clock.
class Vigil {
    using Clock = std::chrono::steady_clock;

public:
    bool begun() const noexcept { return deadline_ != Clock::time_point{}; }

    /// Once `limit` has passed calls `on_limit(by)`, `by` since it was first seen to have, and `roll_call()` every few milliseconds: it
    /// opens files.
    template <class OnLimit, class OnRollCall>
    void look(std::chrono::nanoseconds limit, OnLimit&& on_limit, OnRollCall&& roll_call) {
        const auto now = Clock::now();
        if (!begun()) {
            deadline_ = now + limit;
            roll_call_ = now + interval;
        }
        if (now >= deadline_) {
            if (limit_seen_ == Clock::time_point{}) limit_seen_ = now;
            on_limit(now - limit_seen_);
        }
        if (now >= roll_call_) {
            roll_call();
            roll_call_ = now + interval;
        }
    }

    /// Of the time since the last look no more than a second, or a sixteenth of the limit, is waiting: for looks between which somebody
    /// does something else.
    void forgive(std::chrono::nanoseconds limit) noexcept {
        const auto most = gradsync::detail::smaller<std::chrono::nanoseconds>(limit / 16, std::chrono::seconds(1));
        const auto now = Clock::now();
        if (begun() && now - last_ > most) deadline_ += now - last_ - most;
        last_ = now;
    }

    /// A limit was seen to have passed `by` ago. Is it too early to name a rank that may be waiting itself? Those who know more have a
    /// twentieth of the limit, but no less than a quarter of a second, for each of `stages` to say so first.
    static bool too_early(std::chrono::nanoseconds by, std::chrono::nanoseconds limit, int stages = 1) noexcept {
        return by < stages * gradsync::detail::larger<std::chrono::nanoseconds>(limit / 20, std::chrono::milliseconds(250));
    }

private:
    static constexpr std::chrono::nanoseconds interval = std::chrono::milliseconds(5);
    Clock::time_point deadline_{}, roll_call_{};
    Clock::time_point last_{};        ///< forgiven
    Clock::time_point limit_seen_{};  ///< to have passed: later than the deadline where the rank was off its core
};

}  // namespace gradsync::inline v0_2::collective
