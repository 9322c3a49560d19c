// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>

#include "../core/clock.hpp"

namespace gradsync::inline v0_2::collective {

inline void pause_briefly() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

/// The core that the calling thread runs on, or `otherwise` if the system does not say.
inline int current_core(int otherwise) noexcept {
    const int core = ::sched_getcpu();
    return core < 0 ? otherwise : core;
}

/// Wakes sleepers, in this process or in others that share its memory. A `ring()` costs one load if nobody sleeps.
///
/// A thread that is just falling asleep may miss a ring. Naps are short, so a miss costs a millisecond, and threads that do not sleep need
/// no fence.
class WaitQueue {
public:
    void ring() noexcept {
        if (sleepers_.load(std::memory_order_relaxed) == 0) return;
        rings_.fetch_add(1, std::memory_order_release);
        ::syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    /// Returns on a ring, or after `limit`, which must be less than a second.
    template <class Predicate>
    void nap(Predicate&& awake, std::chrono::nanoseconds limit) {
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        [[maybe_unused]] const std::uint32_t heard = rings_.load(std::memory_order_acquire);
        if (!awake()) {
            const timespec time{0, static_cast<long>(limit.count())};
            ::syscall(SYS_futex, &rings_, FUTEX_WAIT, heard, &time, nullptr, 0);
        }
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }

private:
    std::atomic<std::uint32_t> rings_{0};
    std::atomic<int> sleepers_{0};
};
static_assert(sizeof(std::atomic<std::uint32_t>) == 4, "a futex is a 32-bit word");

/// One wait: spins briefly, then yields, then naps. Two ranks on two cores meet while spinning. With more ranks than cores, a spinning rank
/// keeps the one that it waits for from running, so it yields almost at once. After half a millisecond the core is worth more to others
/// than the microseconds are to this rank.
class Backoff {
public:
    /// `nap`: the longest sleep between two looks.
    explicit Backoff(bool cores_are_shared, std::chrono::nanoseconds nap = std::chrono::milliseconds(1)) noexcept
        : spins_left_(cores_are_shared ? 20 : 50), nap_(nap) {}

    /// One round. `awake` says whether to skip the nap.
    template <class Predicate>
    void wait_a_little(WaitQueue& wait_queue, Predicate&& awake) {
        if (spins_left_ > 0) {
            --spins_left_;
            pause_briefly();
            return;
        }
        const auto now = std::chrono::steady_clock::now();
        if (yielding_since_ == std::chrono::steady_clock::time_point{}) yielding_since_ = now;
        if (now - yielding_since_ < std::chrono::microseconds(500)) ::sched_yield();
        else wait_queue.nap(awake, nap_);
    }

    /// True once spinning is over: from then on, looking at the clock and at flags costs little in comparison.
    bool patient() const noexcept { return spins_left_ == 0; }

private:
    int spins_left_;
    std::chrono::nanoseconds nap_;
    std::chrono::steady_clock::time_point yielding_since_{};
};

}  // namespace gradsync::inline v0_2::collective
