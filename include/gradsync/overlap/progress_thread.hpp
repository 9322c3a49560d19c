// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <sched.h>

#include "../core/overlap_policy.hpp"
#include "../core/thread.hpp"

namespace gradsync::inline v0_2::detail {

/// A thread that advances a launcher's collectives while some are in flight, and sleeps otherwise.
class ProgressThread {
public:
    ProgressThread() = default;
    /// Copies are made only before `start`, when there is nothing to copy.
    ProgressThread(const ProgressThread&) noexcept {}
    ~ProgressThread() { stop(); }

    bool running() const noexcept { return thread_.joinable(); }
    /// True if the thread advances collectives. False if it may not communicate (MPI_THREAD_FUNNELED, say), or if the
    /// launcher has failed. Other callers must then poll, and get the error if there is one.
    bool working() const noexcept { return running() && !gave_up_.load(std::memory_order_relaxed); }

    /// `launcher` must live until `stop()` has returned.
    void start(BucketLauncher& launcher) {
        launcher_ = &launcher;
        thread_.start(*this);
    }
    /// The thread's function.
    void operator()() {
        while (next_orders() != stopping) {
            try {
                // Collectives between ranks that share memory take microseconds. A longer one crosses a network, which
                // tolerates pauses; constant polls would slow down compute on the same core.
                for (int polls = 0; launcher_->in_flight() && orders_.load(std::memory_order_acquire) < stopping;
                     ++polls) {
                    launcher_->poll();
                    if (polls < 100) ::sched_yield();
                    else ::usleep(50);
                }
            } catch (...) {
                gave_up_.store(true, std::memory_order_relaxed);
            }
        }
    }

    /// Wakes the thread after collectives were started. Thread-safe.
    void wake() noexcept { order(has_work); }

    void stop() noexcept {
        if (!running()) return;
        order(stopping);
        thread_.join();
    }

private:
    void order(std::uint32_t what) noexcept {
        orders_.fetch_or(what, std::memory_order_acq_rel);
        orders_.notify_one();
    }
    /// Sleeps while there are no orders.
    std::uint32_t next_orders() noexcept {
        orders_.wait(0, std::memory_order_acquire);
        return orders_.fetch_and(stopping, std::memory_order_acq_rel) & stopping;
    }

    static constexpr std::uint32_t has_work = 1, stopping = 2;
    std::atomic<std::uint32_t> orders_{0};  ///< these flags; `has_work`: collectives may be in flight
    std::atomic<bool> gave_up_{false};
    BucketLauncher* launcher_ = nullptr;
    Thread thread_;
};

}  // namespace gradsync::inline v0_2::detail
