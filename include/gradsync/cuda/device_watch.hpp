// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <condition_variable>
#include <thread>

#include "../collective/world.hpp"
#include "runtime.hpp"

namespace gradsync::inline v0_2::detail {

/// A thread that all device communicators of one rank and origin share. It advances their operations and detects failures while the rank
/// computes.
class DeviceWatch {
public:
    DeviceWatch(int device, collective::ProgressHooks& hooks) : device_(device), thread_([this, &hooks] { watch(hooks); }) {}
    DeviceWatch& operator=(DeviceWatch&&) = delete;
    ~DeviceWatch() {
        {
            const std::lock_guard lock(mutex_);
            stopped_ = true;
        }
        changed_.notify_one();
        thread_.join();
    }

    /// Something is in flight: polls often, until nothing has been started for a while.
    void wake() noexcept {
        const std::lock_guard lock(mutex_);
        if (ticks_left_ == 0) changed_.notify_one();
        ticks_left_ = ticks_awake;
    }

private:
    static constexpr std::chrono::microseconds tick{500};
    static constexpr std::chrono::milliseconds nap{20};
    static constexpr int ticks_awake = 2000;

    void watch(collective::ProgressHooks& hooks) {
        cudaSetDevice(device_);
        std::unique_lock lock(mutex_);
        while (!stopped_) {
            if (ticks_left_ > 0) --ticks_left_;
            lock.unlock();
            hooks.progress();
            lock.lock();
            if (!stopped_) changed_.wait_for(lock, ticks_left_ > 0 ? std::chrono::nanoseconds(tick) : std::chrono::nanoseconds(nap));
        }
    }

    const int device_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool stopped_ = false;
    int ticks_left_ = 0;
    std::thread thread_;
};

}  // namespace gradsync::inline v0_2::detail
