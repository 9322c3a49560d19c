#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "../core/overlap_policy.hpp"

namespace gradsync::inline v0 {

/// As `OverlapBackward`, but a thread of the policy's own advances the collectives: the choice where a core is
/// spare, or where the compute is off the CPU. On cores that all compute it only takes turns with them.
class OverlapBackwardThread {
public:
    OverlapBackwardThread() = default;
    /// Only before `attach`, and so there is nothing to move.
    OverlapBackwardThread(OverlapBackwardThread&&) noexcept {}
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
                    while (engine.in_flight() && !stopping()) {
                        engine.poll();
                        std::this_thread::yield();
                    }
                } catch (...) {
                    // The engine has failed for good; finish() reports it where somebody listens.
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
