// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <thread>

namespace gradsync::inline v0_2::detail {

/// A lock for sections of well under a microsecond.
class SpinLock {
public:
    void lock() noexcept {
        while (!try_lock()) std::this_thread::yield();
    }
    bool try_lock() noexcept { return !locked_.exchange(true, std::memory_order_acquire); }
    void unlock() noexcept { locked_.store(false, std::memory_order_release); }

private:
    std::atomic<bool> locked_{false};
};

}  // namespace gradsync::inline v0_2::detail
