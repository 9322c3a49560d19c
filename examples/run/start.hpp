// SPDX-License-Identifier: BSL-1.0
#pragma once
// One start of a job: all ranks, from their start to the end of the last one.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "options.hpp"
#include "output.hpp"
#include "processes.hpp"

namespace gradsync_run {

struct Rank {
    pid_t process = -1;
    Descriptor handle;                   // pidfd; readable at its end
    std::vector<Stream> streams;         // standard output and error
    std::optional<int> end;              // as waitpid gives it
    std::optional<double> failed_after;  // seconds; ranks that failed only
};

/// How a start ended.
struct Outcome {
    int status = 0;      // 0, or that of the rank that failed first, or 128 + signal
    bool asked = false;  // a signal asked for the end
    double seconds = 0;
    std::vector<std::string> account = {};  // lines for people, if a rank failed
};

/// Tells a start of what happens outside.
struct Events {
    int signals;   // signalfd
    int lifeline;  // a pipe: at its end the launcher is gone
};

/// Starts all ranks and waits for their end. `number`: starts before this one. Throws if a rank cannot be started.
Outcome run_once(const Options& options, unsigned number, Events events);

}  // namespace gradsync_run
