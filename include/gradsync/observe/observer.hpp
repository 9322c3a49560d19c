// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/bucket_plan.hpp"
#include "../core/clock.hpp"

namespace gradsync::inline v0_2 {

/// The activities of a Reducer or a sharded optimizer. All but the last three hold up the step, unless a thread of the
/// overlap policy does them.
enum class Activity : std::uint8_t {
    copy,        ///< a gradient is copied into its bucket (reported from 16 KiB on)
    launch,      ///< a bucket's collective starts
    progress,    ///< a hook advances collectives
    finish,      ///< `finish()` launches the remaining buckets, waits for all, and hands out the results
    wait,        ///< a wait for the result of a gather; without an index: for memory of pooled gradients
    optimizer,   ///< the optimizer steps this rank's shard of a bucket
    collective,  ///< a bucket is in flight, until this rank sees that it is complete
    gather,      ///< the all-gather of a bucket is in flight, until this rank sees that it is complete
};
inline constexpr std::size_t activity_count = 8;  ///< Internal: the number of activities.

/// "copy", "launch", ...
constexpr std::string_view name_of(Activity activity) noexcept {
    return detail::name_in({"copy", "launch", "progress", "finish", "wait", "optimizer", "collective", "gather"},
                           activity);
}

/// True if the activity holds up the step. The optimizer does not count: all training has one.
constexpr bool is_exposed(Activity activity) noexcept {
    return activity != Activity::optimizer && activity != Activity::collective && activity != Activity::gather;
}

/// Receives the events of a Reducer as they happen; set it in ReducerOptions::observer. Each Reducer has its own.
/// `Timeline` keeps the events for a trace. Your own observer may feed a profiler or a monitor. The acting thread calls
/// the functions during the step, possibly several threads at once. They must be thread-safe, return at once, and not
/// throw. Times are on the backend's clock (`backend_now`).
class Observer {
public:
    using Time = std::chrono::steady_clock::time_point;  ///< on the backend's clock
    /// The index of an activity that belongs to no bucket.
    static constexpr std::size_t no_index = static_cast<std::size_t>(-1);

    virtual ~Observer() = default;

    /// Called before the first step, and when the plan changes. `bytes` (by bucket) and `names` (by parameter) are
    /// valid during the call.
    virtual void plan([[maybe_unused]] const BucketPlan& plan, [[maybe_unused]] std::span<const std::size_t> bytes,
                      [[maybe_unused]] std::span<const std::string_view> names) {}
    virtual void ready(std::size_t parameter, Time at) noexcept = 0;  ///< A gradient is marked.
    /// `index` is the bucket, the parameter for `copy`, or `no_index` if the activity belongs to no bucket. An activity
    /// of one index ends before it begins again. `at` may be slightly earlier than the call.
    virtual void begin(Activity activity, std::size_t index, Time at) noexcept = 0;
    virtual void end(Activity activity, std::size_t index, Time at) noexcept = 0;  ///< The activity ends; see `begin`.
};

/// The synchronisation of one step, or of several steps together. Times are seconds on this rank. A Reducer's step goes
/// from one `finish()` to the next. With OverlapForward a step's gathers run during the next forward, so their times
/// count for the next step.
struct StepStatistics {
    std::size_t bytes = 0;        ///< bytes that this rank passed to collectives, gathers included
    std::size_t collectives = 0;  ///< collectives that this rank started
    std::size_t skipped = 0;      ///< steps that NonFinite::skip skipped
    /// Time with at least one bucket in flight or being gathered, as seen by this rank.
    double communication_seconds = 0;
    /// Time that `finish()` and the hooks added to the step; concurrent threads count once. Copies of borrowed
    /// gradients below 16 KiB do not count: reading the clock would take as long.
    double exposed_seconds = 0;

    /// The share of the communication that the trainer's work hides: 1 - exposed / communication, within [0, 1].
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

/// One bucket of the last step. Times are seconds since the step's first launch. A bucket ends when this
/// rank sees that it is complete.
struct BucketStatistics {
    std::size_t bytes = 0;      ///< of the bucket's gradients
    double launch_seconds = 0;  ///< when this rank started its collective
    double end_seconds = 0;     ///< when this rank saw its end
};

/// The statistics of a Reducer, which are always on.
struct Statistics {
    std::string transport;           ///< how the ranks reach one another, in the backend's words
    std::uint64_t steps = 0;         ///< complete steps
    StepStatistics last;             ///< the last step
    StepStatistics total;            ///< all steps together
    List<BucketStatistics> buckets;  ///< of the last step, in the order of launch
    /// The time at which each gradient becomes ready, as the ranks agreed in `rebuild_buckets` for a TimedBucketPolicy:
    /// by parameter, in seconds after the first; empty before.
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
    double overlap_ratio() const noexcept { return total.overlap_ratio(); }  ///< The same as `total.overlap_ratio()`.
};

}  // namespace gradsync::inline v0_2
