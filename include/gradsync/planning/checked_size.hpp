// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <limits>

#include "../core/error.hpp"
#include "../core/math.hpp"

/// @file
/// Arithmetic of plans whose inputs a user may mistype: it throws instead of wrapping around.

namespace gradsync::inline v0_2::plan {

namespace detail {

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const Parts&... parts) {
    gradsync::detail::raise(Errc::invalid_argument, {.operation = "plan"}, parts...);
}

struct Named {
    std::uint64_t value;
    const char* name;
};
/// Throws Error(invalid_argument) if a number is 0.
inline void check_positive(std::initializer_list<Named> numbers) {
    for (const Named& number : numbers)
        if (number.value == 0) refuse(number.name, " is 0, but must be positive");
}

/// Throws Error(invalid_argument) unless `value`, the argument `what` of `operation`, is a finite number of 0 or more.
inline void check_amount(const char* operation, const char* what, double value, int rank = -1) {
    if (!(value >= 0) || !gradsync::detail::is_finite(value))
        gradsync::detail::refuse({operation, rank}, what, " must be a finite number of 0 or more, not ",
                                 std::to_string(value));
}

}  // namespace detail

/// A count of elements, samples or bytes. Sums and products throw Error(invalid_argument) if they do not fit into
/// 64 bits, because a plan with a wrong number is worse than none.
class CheckedSize {
public:
    constexpr CheckedSize(std::uint64_t value) noexcept : value_(value) {}

    constexpr std::uint64_t value() const noexcept { return value_; }

    friend constexpr CheckedSize operator+(CheckedSize a, CheckedSize b) {
        if (a.value_ > most - b.value_) refuse(a.value_, " + ", b.value_);
        return a.value_ + b.value_;
    }
    friend constexpr CheckedSize operator*(CheckedSize a, CheckedSize b) {
        if (b.value_ != 0 && a.value_ > most / b.value_) refuse(a.value_, " * ", b.value_);
        return a.value_ * b.value_;
    }

private:
    static constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();

    [[noreturn]] static void refuse(std::uint64_t a, const char* operation, std::uint64_t b) {
        detail::refuse(a, operation, b, " is more than 64 bits hold; look for a typing error in the sizes");
    }

    std::uint64_t value_;
};

}  // namespace gradsync::inline v0_2::plan
