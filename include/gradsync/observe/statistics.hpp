// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gradsync::inline v0_2 {

/// What the synchronisation of one step was, or of several steps together. Times are seconds of one rank. A Reducer's step is from one
/// `finish()` to the next: with OverlapForward the times of a step's gathers, under the next forward, are in the next one's.
struct StepStatistics {
    std::size_t bytes = 0;  ///< handed to collectives by this rank, gathers included
    std::size_t collectives = 0;
    double communication_seconds = 0;  ///< while at least one bucket was in flight, or gathered, seen from this rank
    double exposed_seconds = 0;        ///< what `finish()` and the hooks added to the step; what threads did at once counts once. Copies of
                                       ///< borrowed gradients of less than 16 KiB do not: to read the clock would take as long

    /// The share of the communication that hid behind the trainer's work: 1 - exposed / communication, within [0, 1].
    double overlap_ratio() const noexcept {
        return exposed_seconds < communication_seconds ? 1 - exposed_seconds / communication_seconds : 0;
    }

    StepStatistics& operator+=(const StepStatistics& other) noexcept {
        bytes += other.bytes;
        collectives += other.collectives;
        communication_seconds += other.communication_seconds;
        exposed_seconds += other.exposed_seconds;
        return *this;
    }
};

/// One bucket of the last step. Times are seconds since the step's first launch; the end is when this rank saw it.
struct BucketStatistics {
    std::size_t bytes = 0;
    double launch_seconds = 0;
    double end_seconds = 0;
};

/// What a Reducer has observed; always on.
struct Statistics {
    std::string transport;  ///< how the ranks reach one another, in the backend's words
    std::uint64_t steps = 0;
    StepStatistics last;
    StepStatistics total;
    std::vector<BucketStatistics> buckets;  ///< of the last step, in the order of launch

    /// The average step.
    StepStatistics mean() const noexcept {
        if (steps == 0) return {};
        const double n = static_cast<double>(steps);
        return {total.bytes / steps, total.collectives / steps, total.communication_seconds / n, total.exposed_seconds / n};
    }
    double overlap_ratio() const noexcept { return total.overlap_ratio(); }
};

}  // namespace gradsync::inline v0_2
