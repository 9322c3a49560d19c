#pragma once

#include <string>

#include "../core/overlap_policy.hpp"
#include "progress_thread.hpp"

namespace gradsync::inline v0 {

/// As `OverlapBackward`, but a thread of the policy's own advances the collectives, whatever the backend would have: the choice where
/// the compute is off the CPU. Among ranks that share memory, on cores that all compute, it only takes turns with them. The backend must
/// be callable from any thread (MPI_THREAD_MULTIPLE, where it calls MPI).
class OverlapBackwardThread {
public:
    template <BucketEngine Engine>
    void attach(Engine& engine) {
        thread_.start(engine);
    }
    void bucket_full(BucketEngine auto& engine) {
        engine.launch_full_buckets();
        thread_.wake();
    }
    void gradients_ready(BucketEngine auto&) {}
    void detach() noexcept { thread_.stop(); }
    std::string describe() const { return "OverlapBackwardThread"; }

private:
    detail::ProgressThread thread_;
};

static_assert(OverlapPolicy<OverlapBackwardThread>);

}  // namespace gradsync::inline v0
