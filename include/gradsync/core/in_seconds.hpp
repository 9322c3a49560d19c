// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <string>

#include "clock.hpp"

namespace gradsync::inline v0_2::detail {

/// "1.5 s", whatever the locale; of a duration that is not negative.
inline std::string in_seconds(std::chrono::nanoseconds duration) {
    constexpr std::int64_t second = 1'000'000'000;
    std::string text = std::to_string(duration.count() / second);
    if (const std::int64_t rest = duration.count() % second; rest != 0) {
        const std::string digits = std::to_string(second + rest);
        text += "." + digits.substr(1, digits.find_last_not_of('0'));
    }
    return text + " s";
}

}  // namespace gradsync::inline v0_2::detail
