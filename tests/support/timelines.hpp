// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>

#include <gradsync/observe/timeline.hpp>

namespace gradsync_test {

/// How many spans of this kind a timeline has.
inline std::size_t count_spans(const gradsync::Timeline& timeline, gradsync::Activity activity) {
    const auto spans = timeline.spans();
    return static_cast<std::size_t>(
        std::count_if(spans.begin(), spans.end(), [&](const gradsync::Timeline::Span& s) { return s.activity == activity; }));
}

}  // namespace gradsync_test
