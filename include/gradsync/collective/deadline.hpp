// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/clock.hpp"
#include "../core/error.hpp"
#include "../core/math.hpp"

/// @file
/// Time limits of waits.

namespace gradsync::inline v0_2::collective {

constexpr bool is_limit(std::chrono::nanoseconds timeout) noexcept {
    return timeout > std::chrono::nanoseconds::zero();
}

/// The limit of the meeting at which ranks compare their options: a wrong `timeout` is refused there,
/// on all ranks, and not before.
constexpr std::chrono::nanoseconds limit_or(std::chrono::nanoseconds timeout, std::chrono::nanoseconds usual) noexcept {
    return is_limit(timeout) ? timeout : usual;
}
/// Throws Error(invalid_argument) if `timeout` is no valid time limit of a backend.
inline void check_limit(std::chrono::nanoseconds timeout) {
    if (!is_limit(timeout))
        gradsync::detail::raise(Errc::invalid_argument, "the time limit of a backend must be positive");
}

/// The checks of a long wait: the time limit and, now and then, the liveness of other ranks. Starts with the first
/// look, so that waits of microseconds read no clock.
class Deadline {
    using Clock = std::chrono::steady_clock;

public:
    bool begun() const noexcept { return deadline_ != Clock::time_point{}; }

    /// Calls `on_limit(by)` if `limit` has passed since the first look, or since `moved` has last changed (see
    /// World::moved): a slow network is no failure. Other waits may have moved the data, so one wait lasts at most
    /// `most_limits` limits. `by` is the time since that was first seen. Calls `liveness_check()` only every few
    /// milliseconds, because it opens files. The time since the last look counts as waiting up to a second, or up to a
    /// sixteenth of the limit if that is less. In a longer pause the caller did something else or its process was
    /// stopped, and others may have waited for it.
    template <class OnLimit, class OnLivenessCheck = void (&)()>
    void look(std::chrono::nanoseconds limit, OnLimit&& on_limit, OnLivenessCheck&& liveness_check = nothing,
              std::uint64_t moved = 0) {
        const auto now = Clock::now();
        if (!begun()) {
            last_ = now;
            liveness_check_ = now + interval;
            latest_ = now + most_limits * gradsync::detail::smaller<std::chrono::nanoseconds>(limit, longest);
        }
        if (!begun() || (std::exchange(moved_, moved) != moved && deadline_ < latest_)) {
            moved_ = moved;
            deadline_ = gradsync::detail::smaller(now + limit, latest_);
            limit_seen_ = suspected_ = {};
            suspect_ = -1;
        }
        const auto most = gradsync::detail::smaller<std::chrono::nanoseconds>(limit / 16 + std::chrono::nanoseconds(1),
                                                                              std::chrono::seconds(1));
        if (now - last_ > most) {
            deadline_ += now - last_ - most;
            latest_ += now - last_ - most;
        }
        last_ = now;
        if (now >= deadline_) {
            if (limit_seen_ == Clock::time_point{}) limit_seen_ = now;
            on_limit(now - limit_seen_);
        }
        if (now >= liveness_check_) {
            liveness_check();
            liveness_check_ = now + interval;
        }
    }

    static constexpr int most_limits = 16;  ///< of one wait during which data moves
    static constexpr int most_stages = 8;   ///< the longest respite: for a rank that cannot name any

    /// Is it too early to name a rank that may be waiting itself? `by`: time since the limit was seen to have passed.
    /// Ranks that know more get time to report first: for each of `stages`, a twentieth of the limit and at least a
    /// quarter of a second.
    static bool too_early(std::chrono::nanoseconds by, std::chrono::nanoseconds limit, int stages = 1) noexcept {
        return by <
               stages * gradsync::detail::larger<std::chrono::nanoseconds>(limit / 20, std::chrono::milliseconds(250));
    }

    /// Records that `rank` seems to hold up the others, once the limit was seen to have passed. Returns true if it
    /// became the suspect only recently: a late rank may just have arrived, and the others, which need a moment to
    /// continue, are not to blame. After eight such moments it returns false for any rank.
    bool is_recent_suspect(int rank, std::chrono::nanoseconds limit) noexcept {
        if (std::exchange(suspect_, rank) != rank) suspected_ = last_;
        return too_early(last_ - suspected_, limit) && too_early(last_ - limit_seen_, limit, most_stages);
    }

private:
    static void nothing() noexcept {}
    static constexpr std::chrono::nanoseconds interval = std::chrono::milliseconds(5);
    static constexpr std::chrono::nanoseconds longest = std::chrono::hours(24 * 365 * 10);  ///< that can be multiplied
    std::uint64_t moved_ = 0;
    Clock::time_point deadline_{}, liveness_check_{};
    Clock::time_point latest_{};  ///< the latest deadline
    Clock::time_point last_{};    ///< the last look
    /// When the limit was first seen to have passed: after the deadline if the rank was descheduled.
    Clock::time_point limit_seen_{};
    Clock::time_point suspected_{};  ///< since when `suspect_` is the suspect
    int suspect_ = -1;
};

}  // namespace gradsync::inline v0_2::collective
