// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "progress_thread.hpp"

namespace gradsync::inline v0_2 {

/// Selects how started collectives advance during the backward.
enum class Progress : std::uint8_t {
    automatic,  ///< `thread` if the backend wants one, else `polls`
    /// `mark_ready` polls now and then. For ranks that share memory: a thread would only compete for their cores.
    polls,
    /// The policy's own thread polls. For messages between machines, which MPI moves only inside calls, and for compute
    /// off the CPU. The backend must be callable from any thread (MPI_THREAD_MULTIPLE if it calls MPI).
    thread,
};

/// Launches a bucket as soon as it is full and its turn has come in the plan's order.
class OverlapBackward {
public:
    OverlapBackward() = default;
    /// Chooses how collectives advance.
    explicit OverlapBackward(Progress progress) noexcept : progress_(progress) {}

    void attach(BucketLauncher& launcher) {
        if (progress_ == Progress::automatic ? launcher.wants_thread() : progress_ == Progress::thread)
            thread_.start(launcher);
    }
    void bucket_full(BucketLauncher& launcher) {
        launcher.launch_full_buckets();
        if (thread_.running()) thread_.wake();
    }
    void gradients_ready(BucketLauncher& launcher) {
        if (!thread_.working() && launcher.in_flight()) launcher.poll();
    }
    void detach() noexcept { thread_.stop(); }
    bool only_polls() const noexcept { return progress_ == Progress::polls; }  ///< see the concept OverlapPolicy
    std::string describe() const { return describe_as("OverlapBackward"); }

protected:
    /// `name`, followed by the progress mode unless it is automatic.
    std::string describe_as(std::string name) const {
        constexpr const char* progress[] = {"", "{polls}", "{thread}"};  // by Progress
        return name + progress[static_cast<int>(progress_)];
    }

private:
    Progress progress_ = Progress::automatic;
    detail::ProgressThread thread_;
};

static_assert(OverlapPolicy<OverlapBackward>);

}  // namespace gradsync::inline v0_2
