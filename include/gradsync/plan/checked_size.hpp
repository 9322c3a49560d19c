// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "../core/error.hpp"

namespace gradsync::inline v0_2::plan {

namespace detail {

[[noreturn]] inline void refuse(const std::string& what) { throw Error(Errc::invalid_argument, what, {.operation = "plan"}); }

/// Returns `value`. Throws Error(invalid_argument) if it is 0.
inline std::uint64_t positive(std::uint64_t value, const char* what) {
    if (value == 0) refuse(std::string(what) + " is 0, but must be positive");
    return value;
}

}  // namespace detail

/// A count of elements, samples or bytes. Sums and products throw Error(invalid_argument) if they do not fit into 64 bits, because a plan
/// with a wrong number is worse than none.
class CheckedSize {
public:
    constexpr CheckedSize(std::uint64_t value) noexcept : value_(value) {}

    constexpr std::uint64_t value() const noexcept { return value_; }

    friend constexpr CheckedSize operator+(CheckedSize a, CheckedSize b) {
        if (a.value_ > most - b.value_) refuse(a.value_, '+', b.value_);
        return a.value_ + b.value_;
    }
    friend constexpr CheckedSize operator*(CheckedSize a, CheckedSize b) {
        if (b.value_ != 0 && a.value_ > most / b.value_) refuse(a.value_, '*', b.value_);
        return a.value_ * b.value_;
    }
    friend constexpr bool operator==(CheckedSize, CheckedSize) = default;

private:
    static constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();

    [[noreturn]] static void refuse(std::uint64_t a, char operation, std::uint64_t b) {
        detail::refuse(std::to_string(a) + " " + operation + " " + std::to_string(b) +
                       " is more than 64 bits hold; look for a typing error in the sizes");
    }

    std::uint64_t value_;
};

}  // namespace gradsync::inline v0_2::plan
