#pragma once
// What the subcommands of gradsync_plan have in common.

#include <charconv>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "plot.hpp"
#include "table.hpp"

namespace gradsync_plan {

using Json = nlohmann::ordered_json;

/// A command line that cannot be meant; its text is the sentence.
struct UsageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// What a subcommand has to say: to people, to programs, and as a picture.
struct Answer {
    std::vector<Table> tables;
    Json json;
    Chart chart;  // without curves: there is nothing to draw
};

/// Adds a subcommand with its flags. What it answers is known once the command line has been read.
using Question = std::function<Answer()>;
Question add_batch(CLI::App& app);
Question add_memory(CLI::App& app);
Question add_buckets(CLI::App& app);
Question add_scale(CLI::App& app);

/// Accepts whole numbers from `least` on that 64 bits hold. (CLI11 itself takes larger ones for the largest.)
inline CLI::Validator whole_number(std::uint64_t least = 1) {
    return {[least](std::string& text) -> std::string {
                std::uint64_t value = 0;
                const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
                if (error == std::errc{} && end == text.data() + text.size() && value >= least) return {};
                return "'" + text + "' is not a whole number from " + std::to_string(least) + " to 18446744073709551615";
            },
            ""};
}

/// Accepts numbers of 0 or more, or only positive ones.
inline CLI::Validator amount(bool positive = false) {
    return {[positive](std::string& text) -> std::string {
                double value = 0;
                const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
                const bool good = error == std::errc{} && end == text.data() + text.size() && value >= 0 && value <= 1e300;
                if (good && (!positive || value > 0)) return {};
                return "'" + text + "' is not a " + (positive ? "positive number" : "number of 0 or more");
            },
            ""};
}

}  // namespace gradsync_plan
