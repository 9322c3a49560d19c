// SPDX-License-Identifier: BSL-1.0
#include <gradsync/core/math.hpp>

#include <doctest/doctest.h>

#include <limits>

using gradsync::detail::is_finite;
using gradsync::detail::square_root;
using Limits = std::numeric_limits<double>;

static_assert(is_finite(0) && is_finite(-1.5) && is_finite(Limits::max()) && is_finite(Limits::lowest()) &&
              is_finite(Limits::denorm_min()));
static_assert(!is_finite(Limits::infinity()) && !is_finite(-Limits::infinity()) && !is_finite(Limits::quiet_NaN()));

TEST_CASE("square_root") {
    CHECK(square_root(0) == 0);
    CHECK(square_root(2.25) == 1.5);
    CHECK(!is_finite(square_root(Limits::infinity())));
    CHECK(!is_finite(square_root(Limits::quiet_NaN())));
}
