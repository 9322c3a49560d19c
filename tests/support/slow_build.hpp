// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

namespace gradsync_test {

/// Whether sanitizers watch. They make a test up to thirty times slower, and look for errors of memory and of threads, which some of the
/// numbers show as well as all of them: such a build leaves out cases that differ in numbers only.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool slow_build = true;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
inline constexpr bool slow_build = true;
#else
inline constexpr bool slow_build = false;
#endif
#else
inline constexpr bool slow_build = false;
#endif

/// How many ranks a test is repeated with: `least` to `most`; in a slow build, one and three of these.
inline std::vector<int> rank_counts(int least = 1, int most = 4) {
    std::vector<int> counts;
    for (int ranks = least; ranks <= most; ++ranks)
        if (!slow_build || ranks % 2 == 1) counts.push_back(ranks);
    return counts;
}

/// Of `n` cases that differ in numbers only, how many are run.
constexpr std::size_t number_of_cases(std::size_t n) { return slow_build ? (n + 7) / 8 : n; }

/// Whether the next case of many is run, of which all are where sanitizers do not watch.
class Thinned {
public:
    bool next() { return !slow_build || number_++ % 7 == 0; }

private:
    std::size_t number_ = 0;
};

}  // namespace gradsync_test
