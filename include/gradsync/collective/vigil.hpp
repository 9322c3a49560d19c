#pragma once

#include "../core/clock.hpp"

namespace gradsync::inline v0::collective {

/// What a wait that lasts has to look at: its time limit and, now and then, who is still there. It begins with the first
/// look, so that waits of microseconds read no clock.
class Vigil {
    using Clock = std::chrono::steady_clock;

public:
    bool begun() const noexcept { return deadline_ != Clock::time_point{}; }

    /// Calls `on_limit(by)` when `limit` has passed, by that much, and `roll_call()` every few milliseconds: it opens files.
    template <class OnLimit, class OnRollCall>
    void look(std::chrono::nanoseconds limit, OnLimit&& on_limit, OnRollCall&& roll_call) {
        const auto now = Clock::now();
        if (!begun()) {
            deadline_ = now + limit;
            roll_call_ = now + interval;
        }
        if (now >= deadline_) on_limit(now - deadline_);
        if (now >= roll_call_) {
            roll_call();
            roll_call_ = now + interval;
        }
    }

    /// A limit has passed by `by`. Is it too early to blame anybody who may be waiting himself? Those who know more have a twentieth of the
    /// limit for each of `stages` to say so first.
    static bool too_early(std::chrono::nanoseconds by, std::chrono::nanoseconds limit, int stages = 1) noexcept { return by < stages * (limit / 20); }

private:
    static constexpr std::chrono::nanoseconds interval = std::chrono::milliseconds(5);
    Clock::time_point deadline_{}, roll_call_{};
};

}  // namespace gradsync::inline v0::collective
