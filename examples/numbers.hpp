// SPDX-License-Identifier: BSL-1.0
#pragma once
// Numbers on command lines.

#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <system_error>

#include <CLI/CLI.hpp>

namespace gradsync_examples {

/// As `1`, `0.5` or `1e+09`: no more digits than it takes to tell it from others.
template <class Number>
std::string as_text(Number value) {
    char text[64];
    const auto [end, error] = std::to_chars(text, text + sizeof text, value);
    return error == std::errc{} ? std::string(text, end) : std::to_string(value);
}

/// Is all of `text` a number from `least` to `most`? Not so what is none (nan), and what the type cannot hold: CLI11's own checks let
/// both pass, and take -1 for the largest number where there are no negative ones.
template <class Number>
bool is_number(const std::string& text, Number least, Number most) {
    Number value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc{} && end == text.data() + text.size() && value >= least && value <= most;
}

/// Accepts numbers from `least` to `most`. Says nothing on the help page.
template <class Number>
CLI::Validator within(Number least, Number most = std::numeric_limits<Number>::max()) {
    return {[least, most](std::string& text) -> std::string {
                if (is_number(text, least, most)) return {};
                return "'" + text + "' is not a " + (std::integral<Number> ? "whole number" : "number") + " from " + as_text(least) +
                       " to " + as_text(most);
            },
            ""};
}

/// Accepts amounts that can be meant, in whatever unit: products of several are numbers, too. 0 unless `positive`.
inline CLI::Validator amount(bool positive = false) { return within(positive ? 1e-15 : 0.0, 1e15); }

}  // namespace gradsync_examples
