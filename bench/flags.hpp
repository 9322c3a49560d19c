// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "contest.hpp"

namespace bench {

/// The flags of ours, which it takes out of argv: the rest is Google Benchmark's. A wrong one ends the program with
/// exit code 2.
class Flags {
public:
    Flags(int& argc, char** argv) : argc_(argc), argv_(argv) {}

    /// --NAME
    bool take(std::string_view name) {
        return take_if([&](std::string_view argument) { return argument == "--" + std::string(name); });
    }

    /// --NAME=NUMBER, of at least `least`; or `otherwise`.
    double take(std::string_view name, double least, double otherwise) {
        const std::string begin = "--" + std::string(name) + "=";
        take_if([&](std::string_view argument) {
            if (!argument.starts_with(begin)) return false;
            const std::string text(argument.substr(begin.size()));
            char* end = nullptr;
            otherwise = std::strtod(text.c_str(), &end);
            if (!text.empty() && *end == '\0' && otherwise >= least) return true;
            std::fprintf(stderr, "%s: --%s takes a number of at least %g, not '%s'\n", argv_[0], std::string(name).c_str(), least,
                         text.c_str());
            std::exit(2);
        });
        return otherwise;
    }

    /// Returns the TEXT of each --NAME=TEXT.
    std::vector<std::string> take_all(std::string_view name) {
        const std::string begin = "--" + std::string(name) + "=";
        std::vector<std::string> texts;
        take_if([&](std::string_view argument) {
            if (!argument.starts_with(begin)) return false;
            texts.emplace_back(argument.substr(begin.size()));
            return true;
        });
        return texts;
    }

    /// --seconds=S --rounds=N --no-pin
    void take(ContestOptions& options) {
        options.seconds = take("seconds", 0, options.seconds);
        options.rounds = static_cast<int>(take("rounds", 1, options.rounds));
        if (take("no-pin")) options.pin = false;
    }

private:
    template <class Mine>
    bool take_if(Mine&& mine) {
        int kept = 1;
        for (int i = 1; i < argc_; ++i)
            if (!mine(argv_[i])) argv_[kept++] = argv_[i];
        const bool found = kept < argc_;
        argc_ = kept;
        return found;
    }

    int& argc_;
    char** argv_;
};

}  // namespace bench
