// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "../core/bucket_plan.hpp"
#include "../core/clock.hpp"

namespace gradsync::inline v0_2 {

/// What a Reducer, or a sharded training, is busy with. All but the last three hold the step up while they last, unless a thread of the
/// overlap policy's does them.
enum class Activity : std::uint8_t {
    copy,        ///< a gradient is copied into its bucket (only larger ones are told of)
    launch,      ///< a bucket's collective is started
    progress,    ///< collectives are advanced in a hook
    finish,      ///< `finish()`: what is left is launched, waited for and handed out
    wait,        ///< for what a gather brings; without an index: for memory of gradients that are pooled
    optimizer,   ///< a sharded training steps its shard of a bucket
    collective,  ///< a bucket is on its way, until this rank sees that it has arrived
    gather,      ///< likewise, the all-gather of a bucket
};
inline constexpr std::size_t activity_count = 8;

/// "copy", "launch", ...
constexpr std::string_view name_of(Activity activity) noexcept {
    constexpr std::string_view names[activity_count] = {"copy", "launch",    "progress",   "finish",
                                                        "wait", "optimizer", "collective", "gather"};
    return names[static_cast<std::size_t>(activity)];
}

/// Does it hold the step up? (`optimizer` is work that any training has.)
constexpr bool is_exposed(Activity activity) noexcept {
    return activity != Activity::optimizer && activity != Activity::collective && activity != Activity::gather;
}

/// Is told what a Reducer does, as it does it: ReducerOptions::observer. `Timeline` keeps it for a trace; one of your own may feed a
/// profiler or a monitor. Functions are called from whatever thread does the thing, several at once perhaps, in the middle of the
/// step: they return at once and do not throw. Times are those of the backend's clock (`backend_now`).
class Observer {
public:
    using Time = std::chrono::steady_clock::time_point;
    static constexpr std::size_t no_index = static_cast<std::size_t>(-1);

    virtual ~Observer() = default;

    /// Before the first step, and when the plan changes: `bytes` and `names` are by bucket and by parameter, and valid during the call.
    virtual void plan([[maybe_unused]] const BucketPlan& plan, [[maybe_unused]] std::span<const std::size_t> bytes,
                      [[maybe_unused]] std::span<const std::string_view> names) {}
    virtual void ready(std::size_t parameter, Time at) noexcept = 0;
    /// `index`: the bucket; for `copy` the parameter; `no_index` where it is no bucket's. An activity of one index ends before it begins
    /// again. `at` may be a little earlier than the call.
    virtual void begin(Activity activity, std::size_t index, Time at) noexcept = 0;
    virtual void end(Activity activity, std::size_t index, Time at) noexcept = 0;

protected:
    Observer() = default;
    Observer(const Observer&) = default;
    Observer& operator=(const Observer&) = default;
};

}  // namespace gradsync::inline v0_2
