// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/bucket_plan.hpp"
#include "../core/clock.hpp"

namespace gradsync::inline v0_2 {

/// The activities of a Reducer or of a sharded training. All but the last three hold the step up, unless a thread of the overlap policy
/// does them.
enum class Activity : std::uint8_t {
    copy,        ///< a gradient is copied into its bucket (reported from 16 KiB on)
    launch,      ///< a bucket's collective is started
    progress,    ///< collectives are advanced in a hook
    finish,      ///< `finish()` launches the remaining buckets, waits for all, and hands out the results
    wait,        ///< for the result of a gather; without an index: for memory of pooled gradients
    optimizer,   ///< a sharded training steps its shard of a bucket
    collective,  ///< a bucket is in flight, until this rank sees that it is complete
    gather,      ///< the all-gather of a bucket is in flight, until this rank sees that it is complete
};
inline constexpr std::size_t activity_count = 8;

/// "copy", "launch", ...
constexpr std::string_view name_of(Activity activity) noexcept {
    return detail::name_in({"copy", "launch", "progress", "finish", "wait", "optimizer", "collective", "gather"}, activity);
}

/// True if the activity holds the step up. The optimizer does not count: every training has one.
constexpr bool is_exposed(Activity activity) noexcept {
    return activity != Activity::optimizer && activity != Activity::collective && activity != Activity::gather;
}

/// Receives the events of a Reducer as they happen; set it in ReducerOptions::observer. `Timeline` keeps the events for a trace. An
/// observer of your own may feed a profiler or a monitor. The thread that acts calls the functions during the step, possibly several
/// threads at once. They must be thread-safe, return at once, and must not throw. Times are of the backend's clock (`backend_now`).
class Observer {
public:
    using Time = std::chrono::steady_clock::time_point;
    static constexpr std::size_t no_index = static_cast<std::size_t>(-1);

    virtual ~Observer() = default;

    /// Called before the first step, and when the plan changes. `bytes` (by bucket) and `names` (by parameter) are valid during the call.
    virtual void plan([[maybe_unused]] const BucketPlan& plan, [[maybe_unused]] std::span<const std::size_t> bytes,
                      [[maybe_unused]] std::span<const std::string_view> names) {}
    virtual void ready(std::size_t parameter, Time at) noexcept = 0;
    /// `index` is the bucket, the parameter for `copy`, or `no_index` if the activity belongs to no bucket. An activity of one index ends
    /// before it begins again. `at` may be a little earlier than the call.
    virtual void begin(Activity activity, std::size_t index, Time at) noexcept = 0;
    virtual void end(Activity activity, std::size_t index, Time at) noexcept = 0;
};

}  // namespace gradsync::inline v0_2
