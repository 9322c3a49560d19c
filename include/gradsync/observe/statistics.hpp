// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <string>

#include "../core/list.hpp"

namespace gradsync::inline v0_2 {

/// The synchronisation of one step, or of several steps together. Times are seconds on this rank. A Reducer's step goes from one `finish()`
/// to the next. With OverlapForward a step's gathers run during the next forward, so that their times count for the next step.
struct StepStatistics {
    std::size_t bytes = 0;  ///< handed to collectives by this rank, gathers included
    std::size_t collectives = 0;
    std::size_t skipped = 0;           ///< steps that NonFinite::skip skipped
    double communication_seconds = 0;  ///< at least one bucket was in flight or gathered, as seen by this rank
    double exposed_seconds = 0;        ///< the time that `finish()` and the hooks added to the step; concurrent threads count once.
                                       ///< Copies of borrowed gradients below 16 KiB do not count: reading the clock would take as long

    /// The share of the communication that hid behind the trainer's work: 1 - exposed / communication, within [0, 1].
    double overlap_ratio() const noexcept {
        return exposed_seconds < communication_seconds ? 1 - exposed_seconds / communication_seconds : 0;
    }

    StepStatistics& operator+=(const StepStatistics& other) noexcept {
        bytes += other.bytes;
        collectives += other.collectives;
        skipped += other.skipped;
        communication_seconds += other.communication_seconds;
        exposed_seconds += other.exposed_seconds;
        return *this;
    }
};

/// One bucket of the last step. Times are seconds since the step's first launch. A bucket ends when this rank sees that it is complete.
struct BucketStatistics {
    std::size_t bytes = 0;
    double launch_seconds = 0;
    double end_seconds = 0;
};

/// The statistics of a Reducer, which are always on.
struct Statistics {
    std::string transport;  ///< how the ranks reach one another, in the backend's words
    std::uint64_t steps = 0;
    StepStatistics last;
    StepStatistics total;
    List<BucketStatistics> buckets;  ///< of the last step, in the order of launch
    /// When gradients become ready, as the ranks agreed in `rebuild_buckets` for a TimedBucketPolicy: by parameter, in seconds after the
    /// first; empty before.
    List<double> ready_seconds;

    /// The average step.
    StepStatistics mean() const noexcept {
        if (steps == 0) return {};
        const double n = static_cast<double>(steps);
        return {.bytes = total.bytes / steps,
                .collectives = total.collectives / steps,
                .communication_seconds = total.communication_seconds / n,
                .exposed_seconds = total.exposed_seconds / n};
    }
    double overlap_ratio() const noexcept { return total.overlap_ratio(); }
};

}  // namespace gradsync::inline v0_2
