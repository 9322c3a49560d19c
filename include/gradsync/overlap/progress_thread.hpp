// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "../core/clock.hpp"
#include "../core/overlap_policy.hpp"

namespace gradsync::inline v0_2::detail {

/// A thread that advances an engine's collectives while some are in flight, and sleeps otherwise.
class ProgressThread {
public:
    ProgressThread() = default;
    /// Copies are made only before `start`, when there is nothing to copy.
    ProgressThread(const ProgressThread&) noexcept {}
    ~ProgressThread() { stop(); }

    bool running() const noexcept { return thread_.joinable(); }
    /// True if the thread advances collectives. False if it may not communicate (MPI_THREAD_FUNNELED, say), or if the engine has failed.
    /// Other callers must then poll, and get the error if there is one.
    bool working() const noexcept { return running() && !gave_up_.load(std::memory_order_relaxed); }

    /// `engine` must live until `stop()` has returned.
    void start(BucketEngine& engine) {
        thread_ = std::thread([this, &engine] {
            std::unique_lock lock(mutex_);
            for (;;) {
                wake_.wait(lock, [&] { return stop_ || work_; });
                if (stop_) return;
                work_ = false;
                lock.unlock();
                try {
                    // Collectives between ranks that share memory take microseconds. A longer one crosses a network, which tolerates
                    // pauses; constant polls would slow down compute on the same core.
                    for (int polls = 0; engine.in_flight() && !stopping(); ++polls) {
                        engine.poll();
                        if (polls < 100) std::this_thread::yield();
                        else std::this_thread::sleep_for(std::chrono::microseconds(50));
                    }
                } catch (...) {
                    gave_up_.store(true, std::memory_order_relaxed);
                }
                lock.lock();
            }
        });
    }

    /// Wakes the thread after collectives were started. Thread-safe.
    void wake() { set(work_); }

    void stop() noexcept {
        if (!running()) return;
        set(stop_);
        thread_.join();
    }

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
    std::atomic<bool> gave_up_{false};
    std::thread thread_;
};

}  // namespace gradsync::inline v0_2::detail
