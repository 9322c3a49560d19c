// SPDX-License-Identifier: BSL-1.0
#pragma once
// One start of a job: all ranks, from their start to the end of the last one.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hosts.hpp"
#include "options.hpp"
#include "output.hpp"
#include "processes.hpp"

namespace gradsync_run {

struct Rank {
    pid_t process = -1;
    Clock::time_point begin = {};
    Descriptor handle = {};                              // pidfd; readable at its end
    std::vector<Stream> streams = {};                    // standard output and error
    std::optional<int> end = {};                         // as waitpid gives it
    std::optional<double> failed_after = {};             // seconds; ranks that failed only
    std::optional<Clock::time_point> starts_again = {};  // in place of one that has failed, while the others go on
    bool is_new = false;                                 // started since the ranks last met
    std::uint64_t member = 0;                            // as which it has joined the others; 0: it has not
    bool is_ended = false;                               // because the others waited for it in vain
    Clock::time_point looked_at_next = {};               // whether it is stopped, until it has joined
    bool was_stopped = false;                            // at the last look
    bool was_listed = false;                             // a generation has had this member
    std::optional<Clock::time_point> left_out = {};      // since when none has it any more
};

/// How a start ended.
struct Outcome {
    int status = 0;             // 0, or that of the rank that failed first, or 128 + signal
    int asked = 0;              // the signal that asked for the end
    std::string hopeless = {};  // why starting again would not help
    bool is_over = false;       // the ranks had ended the job, or were told that it ends
    bool has_state = false;     // the newest one in --state, so that the job can go on later
    unsigned restarts = 0;      // after which other ranks went on
    double seconds = 0;
    std::vector<std::string> account = {};  // lines for people, if a rank failed
};

/// Tells a start of what happens outside.
struct Events {
    int signals;         // signalfd
    int lifeline;        // a pipe: at its end the launcher is gone
    Hosts* hosts;        // or none
    std::string stores;  // below which the stores in which ranks meet have their places; or none
};

/// A job that fails earlier has probably made no progress. After so many such failures in a row it is not started again.
constexpr double soon = 5;  // seconds
constexpr unsigned most_soon = 5;

/// How long to wait before the next start, after so many failures in a row that came soon; in seconds.
constexpr double pause_after(unsigned failures) { return 0.25 * static_cast<double>(1u << failures); }

/// Starts all ranks and waits for their end. A rank that fails is started again if the others meet again (gradsync::Membership). `number`:
/// starts before this one. Throws if a rank cannot be started.
Outcome run_once(const Options& options, unsigned number, const Events& events);

}  // namespace gradsync_run
