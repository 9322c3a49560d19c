// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "clock.hpp"

namespace gradsync::inline v0_2::detail {

/// A time limit that can be added to a time: who wants none may say nanoseconds::max(), and gets a hundred years.
constexpr std::chrono::nanoseconds within_reason(std::chrono::nanoseconds limit) noexcept {
    constexpr std::chrono::nanoseconds longest = std::chrono::hours(24 * 365 * 100);
    return limit < longest ? limit : longest;
}

}  // namespace gradsync::inline v0_2::detail
