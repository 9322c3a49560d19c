// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <doctest/doctest.h>

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <string>

#include "support/slow_build.hpp"
#include "training.hpp"

namespace gradsync_test {

inline constexpr auto time_limit = std::chrono::seconds(20);  // of each wait

/// The training that runs, for a program that crashes, or hangs where no time limit of the library ends it.
inline std::string running;
extern "C" inline void on_signal(int signal) {
    running += signal == SIGALRM ? ": it hangs\n" : ": it crashes\n";
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, running.data(), running.size());
    ::_exit(1);
}

inline std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
    const char* const text = std::getenv(variable);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

/// Checks the trainings of seeds GRADSYNC_TRAININGS_SEED (1) and following, GRADSYNC_TRAININGS_RUNS (`usual`) of them: `run(t)` returns
/// the first fault, or "". `on_device`: they are drawn for devices.
template <class Run>
void check_trainings(std::uint64_t usual, Run&& run, bool on_device = false) {
    const std::uint64_t first = number_from("GRADSYNC_TRAININGS_SEED", 1), runs = number_from("GRADSYNC_TRAININGS_RUNS", usual);
    for (const int signal : {SIGALRM, SIGSEGV, SIGBUS, SIGABRT})
        if (!slow_build || signal == SIGALRM) std::signal(signal, on_signal);  // sanitizers say more
    for (std::uint64_t seed = first; seed < first + runs; ++seed) {
        const DrawnTraining drawn(seed), t = on_device ? drawn.on_device() : drawn;
        running = describe(t);
        running.reserve(running.size() + 20);  // the handler allocates nothing
        ::alarm(static_cast<unsigned>(4 * time_limit.count()));
        std::string wrong;
        try {
            wrong = run(t);
        } catch (const std::exception& error) {
            wrong = error.what();
        }
        CHECK_MESSAGE(wrong.empty(), describe(t), ": ", wrong);
    }
}

}  // namespace gradsync_test
