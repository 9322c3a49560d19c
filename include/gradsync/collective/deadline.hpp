// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

#include "../core/clock.hpp"
#include "../core/math.hpp"
#include "world.hpp"

namespace gradsync::inline v0_2::collective {

/// What a wait that lasts has to look at: its time limit and, now and then, who is still there. It begins with the first
/// look, so that waits of microseconds read no clock.
class Deadline {
    using Clock = std::chrono::steady_clock;

public:
    bool begun() const noexcept { return deadline_ != Clock::time_point{}; }

    /// Once `limit` has passed calls `on_limit(by)`, `by` since it was first seen to have, and `liveness_check()` every few milliseconds: it
    /// opens files.
    template <class OnLimit, class OnLivenessCheck>
    void look(std::chrono::nanoseconds limit, OnLimit&& on_limit, OnLivenessCheck&& liveness_check) {
        const auto now = Clock::now();
        if (!begun()) {
            deadline_ = now + limit;
            liveness_check_ = now + interval;
        }
        if (now >= deadline_) {
            if (limit_seen_ == Clock::time_point{}) limit_seen_ = now;
            on_limit(now - limit_seen_);
        }
        if (now >= liveness_check_) {
            liveness_check();
            liveness_check_ = now + interval;
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
    Clock::time_point deadline_{}, liveness_check_{};
    Clock::time_point last_{};        ///< forgiven
    Clock::time_point limit_seen_{};  ///< to have passed: later than the deadline where the rank was off its core
};

/// Finds out who is dead: a rank whose process has been gone for a while. Its last messages may still be on their way,
/// one that says that it has left among them.
class LivenessCheck {
public:
    explicit LivenessCheck(std::size_t ranks) : gone_since_(ranks) {}

    bool is_dead(World& world, int rank, int world_rank) noexcept {
        using Clock = std::chrono::steady_clock;
        Clock::time_point& since = gone_since_[static_cast<std::size_t>(rank)];
        if (world.alive(world_rank)) since = {};
        else if (since == Clock::time_point{}) since = Clock::now();
        else return Clock::now() - since > std::chrono::milliseconds(20);
        return false;
    }

private:
    std::vector<std::chrono::steady_clock::time_point> gone_since_;
};

}  // namespace gradsync::inline v0_2::collective
