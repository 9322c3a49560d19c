// SPDX-License-Identifier: BSL-1.0
#pragma once
// What the subcommands of gradsync_plan have in common.

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "../numbers.hpp"
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

/// Refuses a model of which nobody could list the gradients or the matrices.
inline void check_blocks(std::uint64_t blocks) {
    constexpr std::uint64_t most = 100'000;
    if (blocks > most)
        throw UsageError("--blocks " + std::to_string(blocks) + " is more than this can hold; " + std::to_string(most) + " is the most");
}

using gradsync_examples::amount;

/// Accepts whole numbers from `least` on that 64 bits hold.
inline CLI::Validator whole_number(std::uint64_t least = 1) { return gradsync_examples::within(least); }

}  // namespace gradsync_plan
