// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <cstdint>

#if !defined(__GNUC__) && !defined(__clang__)
#include <cmath>
#endif

/// What the library needs of <cmath>, which brings the special functions along, and of <algorithm>: a tenth of the time
/// that including this library would take.

namespace gradsync::inline v0_2::detail {

template <class T>
constexpr T smaller(T a, T b) noexcept {
    return b < a ? b : a;
}
template <class T>
constexpr T larger(T a, T b) noexcept {
    return a < b ? b : a;
}

/// Neither infinite nor NaN; from the bits, so that it is right under `-ffast-math` as well.
constexpr bool is_finite(double x) noexcept {
    constexpr std::uint64_t exponent = 0x7ff0'0000'0000'0000u;
    return (std::bit_cast<std::uint64_t>(x) & exponent) != exponent;
}

inline double square_root(double x) noexcept {
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_sqrt(x);
#else
    return std::sqrt(x);
#endif
}

}  // namespace gradsync::inline v0_2::detail
