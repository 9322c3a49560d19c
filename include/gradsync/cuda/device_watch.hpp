// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../collective/world.hpp"
#include "../core/thread.hpp"
#include "runtime.hpp"

namespace gradsync::inline v0_2::detail {

/// A thread that all device communicators of one rank and origin share. It advances their operations and detects
/// failures while the rank computes.
class DeviceWatch {
public:
    DeviceWatch(int device, collective::ProgressHooks& hooks) : device_(device), hooks_(hooks) { thread_.start(*this); }
    DeviceWatch& operator=(DeviceWatch&&) = delete;
    ~DeviceWatch() {
        stopped_ = true;
        changed_.ring();
        thread_.join();
    }

    /// Call when something is in flight: polls often, until nothing has been started for a while.
    void wake() noexcept {
        if (ticks_left_.exchange(ticks_awake) == 0) changed_.ring();
    }
    /// The function of the thread.
    void operator()() {
        cudaSetDevice(device_);
        while (!stopped_) {
            hooks_.progress();
            const bool awake = ticks_left_ != 0;
            if (awake) --ticks_left_;
            changed_.nap([&] { return stopped_ || (!awake && ticks_left_ != 0); },
                         awake ? std::chrono::nanoseconds(tick) : nap);
        }
    }

private:
    static constexpr std::chrono::microseconds tick{500};
    static constexpr std::chrono::milliseconds nap{20};
    static constexpr int ticks_awake = 2000;

    const int device_;
    collective::ProgressHooks& hooks_;
    collective::WaitQueue changed_;
    std::atomic<bool> stopped_{false};
    std::atomic<int> ticks_left_{0};
    Thread thread_;
};

}  // namespace gradsync::inline v0_2::detail
