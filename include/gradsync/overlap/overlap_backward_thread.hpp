#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "../core/clock.hpp"
#include "../core/overlap_policy.hpp"

namespace gradsync::inline v0 {

/// As `OverlapBackward`, but a thread of the policy's own advances the collectives: the choice between machines, whose messages
/// MPI moves only inside calls, and where the compute is off the CPU. Among ranks that share memory, on cores that all compute, it
/// only takes turns with them. The backend must be callable from any thread (MPI_THREAD_MULTIPLE, where it calls MPI).
class OverlapBackwardThread {
public:
    OverlapBackwardThread() = default;
    /// Only before `attach`, and so there is nothing to copy.
    OverlapBackwardThread(const OverlapBackwardThread&) noexcept {}
    ~OverlapBackwardThread() { detach(); }

    template <BucketEngine Engine>
    void attach(Engine& engine) {
        thread_ = std::thread([this, &engine] {
            std::unique_lock lock(mutex_);
            for (;;) {
                wake_.wait(lock, [&] { return stop_ || work_; });
                if (stop_) return;
                work_ = false;
                lock.unlock();
                try {
                    // Among ranks that share memory collectives are over in microseconds. One that takes longer crosses a
                    // network, which does not mind a pause; the compute, on the same core perhaps, does mind polls.
                    for (int polls = 0; engine.in_flight() && !stopping(); ++polls) {
                        engine.poll();
                        if (polls < 100) std::this_thread::yield();
                        else std::this_thread::sleep_for(std::chrono::microseconds(50));
                    }
                } catch (...) {
                    // The engine has failed for good, and finish() reports it where somebody listens; or this thread may not
                    // communicate, and finish() does all the work.
                }
                lock.lock();
            }
        });
    }

    void bucket_full(BucketEngine auto& engine) {
        engine.launch_full_buckets();
        set(work_);
    }

    void gradients_ready(BucketEngine auto&) {}

    void detach() noexcept {
        if (!thread_.joinable()) return;
        set(stop_);
        thread_.join();
    }

    std::string describe() const { return "OverlapBackwardThread"; }

private:
    void set(bool& flag) {
        {
            std::lock_guard lock(mutex_);
            flag = true;
        }
        wake_.notify_one();
    }
    bool stopping() {
        std::lock_guard lock(mutex_);
        return stop_;
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    bool work_ = false;  ///< collectives may be in flight
    bool stop_ = false;
    std::thread thread_;
};

static_assert(OverlapPolicy<OverlapBackwardThread>);

}  // namespace gradsync::inline v0
