// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/list.hpp>
#include <gradsync/core/math.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <vector>

using gradsync::detail::is_finite;
using gradsync::detail::square_root;
using Limits = std::numeric_limits<double>;

static_assert(is_finite(0.0) && is_finite(-1.5) && is_finite(Limits::max()) && is_finite(Limits::lowest()) &&
              is_finite(Limits::denorm_min()));
static_assert(is_finite(std::numeric_limits<float>::max()) && !is_finite(std::numeric_limits<float>::infinity()));
static_assert(!is_finite(Limits::infinity()) && !is_finite(-Limits::infinity()) && !is_finite(Limits::quiet_NaN()));

TEST_CASE("square_root is exact for squares, and not finite for infinity and NaN") {
    CHECK(square_root(0) == 0);
    CHECK(square_root(2.25) == 1.5);
    CHECK(!is_finite(square_root(Limits::infinity())));
    CHECK(!is_finite(square_root(Limits::quiet_NaN())));
}

TEST_CASE("sort_by sorts as std::stable_sort does") {
    std::uint64_t state = 1;
    for (std::size_t size = 0; size < 200; ++size) {
        std::vector<std::pair<int, std::size_t>> expected(size);
        for (std::size_t i = 0; i < size; ++i) expected[i] = {static_cast<int>(gradsync::detail::split_mix(state) % (1 + size / 2)), i};
        const auto before = [](const auto& a, const auto& b) { return a.first < b.first; };
        std::vector<std::pair<int, std::size_t>> sorted = expected;
        gradsync::List<std::pair<int, std::size_t>> list;
        for (const auto& element : expected) list.push_back(element);
        std::stable_sort(expected.begin(), expected.end(), before);
        gradsync::detail::sort_by(sorted, before);
        gradsync::detail::sort_by(list, before);
        CHECK(sorted == expected);
        CHECK(std::equal(list.begin(), list.end(), expected.begin(), expected.end()));
    }
}
