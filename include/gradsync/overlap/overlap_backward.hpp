// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <string>

#include "../core/overlap_policy.hpp"
#include "progress_thread.hpp"

namespace gradsync::inline v0_2 {

/// Who advances started collectives while the backward goes on.
enum class Progress : std::uint8_t {
    automatic,  ///< `thread` where the backend wants it, else `polls`
    polls,      ///< `mark_ready`, now and then: no thread, as progress is work for the same cores where ranks share memory
    thread,     ///< a thread of the policy's: for messages between machines, which MPI moves only inside calls, and for compute that is off
                ///< the CPU. The backend must be callable from any thread (MPI_THREAD_MULTIPLE, where it calls MPI)
};

/// A bucket leaves as soon as it is full and its turn has come.
class OverlapBackward {
public:
    OverlapBackward() = default;
    explicit OverlapBackward(Progress progress) noexcept : progress_(progress) {}

    template <BucketEngine Engine>
    void attach(Engine& engine) {
        if (progress_ == Progress::automatic ? engine.wants_thread() : progress_ == Progress::thread) thread_.start(engine);
    }
    void bucket_full(BucketEngine auto& engine) {
        engine.launch_full_buckets();
        if (thread_.running()) thread_.wake();
    }
    void gradients_ready(BucketEngine auto& engine) {
        if (!thread_.working() && engine.in_flight()) engine.poll();
    }
    void detach() noexcept { thread_.stop(); }
    std::string describe() const { return "OverlapBackward"; }

private:
    Progress progress_ = Progress::automatic;
    detail::ProgressThread thread_;
};

static_assert(OverlapPolicy<OverlapBackward>);

}  // namespace gradsync::inline v0_2
