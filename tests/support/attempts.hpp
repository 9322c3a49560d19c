// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string>

namespace gradsync_test {

/// For cases in which a rank must act within a part of a second: calls `attempt()`, which returns what it found wrong ("" if nothing), until
/// nothing is, at most `times` times. Returns the last finding. A machine with other work may starve a rank once, hardly three times in a row.
template <class F>
std::string wrong_each_time(F&& attempt, int times = 3) {
    std::string wrong = attempt();
    while (!wrong.empty() && --times > 0) wrong = attempt();
    return wrong;
}

/// A finding about a rank whose `text` does not say `words`.
inline std::string if_silent(int rank, const std::string& text, const std::string& words) {
    if (text.find(words) != std::string::npos) return "";
    return "rank " + std::to_string(rank) + ": '" + text + "' does not say '" + words + "'\n";
}

}  // namespace gradsync_test
