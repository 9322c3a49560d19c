// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <type_traits>

namespace gradsync_test {

/// Converts to any type: an aggregate of n members takes n of these in braces, and no more.
struct Anything {
    template <class T>
    operator T() const;  // NOLINT: converts
};
template <class T, class... Given>
constexpr std::size_t count_members() {
    if constexpr (requires { T{Given{}..., Anything{}}; }) return count_members<T, Given..., Anything>();
    else return sizeof...(Given);
}

/// Calls `use(member)` with each number in an aggregate of up to four members, also with those of members.
template <class T, class F>
void for_each_number(T& settings, F&& use) {
    const auto each = [&](auto&... members) { (for_each_number(members, use), ...); };
    if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) {
        use(settings);
    } else if constexpr (std::is_aggregate_v<T> && !std::is_empty_v<T>) {
        constexpr std::size_t count = count_members<T>();
        static_assert(count != 0 && count <= 4, "add a case for more members");
        if constexpr (count == 1) {
            auto& [a] = settings;
            each(a);
        } else if constexpr (count == 2) {
            auto& [a, b] = settings;
            each(a, b);
        } else if constexpr (count == 3) {
            auto& [a, b, c] = settings;
            each(a, b, c);
        } else if constexpr (count == 4) {
            auto& [a, b, c, d] = settings;
            each(a, b, c, d);
        }
    }
}

/// `describe()` tells each setting, because the ranks compare it: each number of an aggregate is changed. Name other settings by hand.
template <class Policy>
void check_settings_are_told(const Policy& policy) {
    Policy other = policy;
    std::size_t number = 0;
    for_each_number(other, [&](auto& setting) {
        const auto before = setting;
        if constexpr (std::is_same_v<decltype(setting), bool&>) setting = !setting;
        else if constexpr (std::is_enum_v<std::remove_reference_t<decltype(setting)>>)
            setting = static_cast<std::remove_reference_t<decltype(setting)>>(static_cast<long>(setting) == 0);
        else setting = static_cast<std::remove_reference_t<decltype(setting)>>(setting + 1);
        ++number;
        INFO("setting ", number, " is not in ", std::string(policy.describe()));
        CHECK(std::string(other.describe()) != std::string(policy.describe()));
        setting = before;
    });
}

}  // namespace gradsync_test
