// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <string>

// Durations and clocks. libstdc++'s <chrono> brings calendars and <sstream> along, a third of this library's
// compile time; its own headers use this part of it alone.
#if defined(__GLIBCXX__) || __has_include(<bits/chrono.h>)
#include <bits/chrono.h>
#else
#include <chrono>
#endif

namespace gradsync::inline v0_2::detail {

/// A time limit that can be added to a time: who wants none may say nanoseconds::max(), and gets a hundred years.
constexpr std::chrono::nanoseconds clamp_timeout(std::chrono::nanoseconds limit) noexcept {
    constexpr std::chrono::nanoseconds longest = std::chrono::hours(24 * 365 * 100);
    return limit < longest ? limit : longest;
}

/// "1.5 s", whatever the locale; of a duration that is not negative.
inline std::string format_duration(std::chrono::nanoseconds duration) {
    constexpr std::int64_t second = 1'000'000'000;
    std::string text = std::to_string(duration.count() / second);
    if (const std::int64_t rest = duration.count() % second; rest != 0) {
        const std::string digits = std::to_string(second + rest);
        text += "." + digits.substr(1, digits.find_last_not_of('0'));
    }
    return text + " s";
}

}  // namespace gradsync::inline v0_2::detail
