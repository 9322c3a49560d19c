// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <mutex>  // for durations and the steady clock, see below

#include "text.hpp"

// Durations and the steady clock come from <mutex>, because libstdc++'s <chrono> also brings calendars and <sstream>: 0.06 s more per file.
// The waits of std::timed_mutex take them, and all standard libraries define these waits in that header, with the steady clock.
static_assert(std::chrono::steady_clock::is_steady);

namespace gradsync::inline v0_2::detail {

/// Limits a time-out to a hundred years, so that it can be added to a time. Callers pass nanoseconds::max() for no limit.
constexpr std::chrono::nanoseconds clamp_timeout(std::chrono::nanoseconds limit) noexcept {
    constexpr std::chrono::nanoseconds longest = std::chrono::hours(24 * 365 * 100);
    return limit < longest ? limit : longest;
}

/// Formats a duration as "1.5 s", in every locale. The duration must not be negative.
[[gnu::cold]] inline std::string format_duration(std::chrono::nanoseconds duration) {
    constexpr std::int64_t second = 1'000'000'000;
    const std::int64_t whole = duration.count() / second, rest = duration.count() % second;
    if (rest == 0) return text(whole, " s");
    const std::string digits = std::to_string(second + rest);
    return text(whole, ".", digits.substr(1, digits.find_last_not_of('0')), " s");
}

}  // namespace gradsync::inline v0_2::detail
