// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <doctest/doctest.h>

#include <string>

namespace gradsync_test {

/// Whether `words` stand in `text`; if not, the report shows both.
inline bool says(const std::string& text, const std::string& words) {
    if (text.find(words) != std::string::npos) return true;
    MESSAGE("'", text, "' does not say '", words, "'");
    return false;
}

}  // namespace gradsync_test
