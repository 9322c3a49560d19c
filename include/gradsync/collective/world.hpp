// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

#include "../core/clock.hpp"
#include "../core/error.hpp"
#include "../core/list.hpp"
#include "../core/math.hpp"
#include "../core/shared.hpp"

/// @file
/// A world: all ranks of a program that can fail together, and how they wake one another.

namespace gradsync::inline v0_2::collective {

inline void pause_briefly() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

/// The core of the calling thread, or `otherwise` if the system does not say.
inline int current_core(int otherwise) noexcept {
    const int core = ::sched_getcpu();
    return core < 0 ? otherwise : core;
}

/// Wakes sleepers, in this process or in others that share its memory. A `ring()` costs one load if nobody sleeps.
///
/// A thread that is just falling asleep may miss a ring. Naps are short, so a miss costs a millisecond, and threads
/// that do not sleep need no fence.
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
            const timespec time{0, limit.count()};
            ::syscall(SYS_futex, &rings_, FUTEX_WAIT, heard, &time, nullptr, 0);
        }
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }

private:
    std::atomic<std::uint32_t> rings_{0};
    std::atomic<int> sleepers_{0};
};
static_assert(sizeof(std::atomic<std::uint32_t>) == 4, "a futex is a 32-bit word");

/// One wait: spins briefly, then yields, then naps. Two ranks on two cores meet while spinning. With more ranks than
/// cores, a spinning rank blocks the one that it waits for, so it yields almost at once. After half a millisecond the
/// core is worth more to others than the microseconds are to this rank.
class Backoff {
public:
    static constexpr std::chrono::nanoseconds longest_nap = std::chrono::milliseconds(1);

    /// `nap`: the longest sleep between two looks. In a long wait it may grow to a 256th of the wait so far, because
    /// that lengthens the wait by less than half a percent.
    explicit Backoff(bool cores_are_shared, std::chrono::nanoseconds nap = longest_nap) noexcept
        : spins_left_(cores_are_shared ? 20 : 50), nap_(nap) {}

    /// One round. `awake`: should it skip the nap?
    template <class Predicate>
    void wait_a_little(WaitQueue& wait_queue, Predicate&& awake) {
        if (spins_left_ > 0) {
            --spins_left_;
            pause_briefly();
            return;
        }
        const auto now = std::chrono::steady_clock::now();
        if (yielding_since_ == std::chrono::steady_clock::time_point{}) yielding_since_ = now;
        const std::chrono::nanoseconds waited = now - yielding_since_;
        if (waited < std::chrono::microseconds(500)) return static_cast<void>(::sched_yield());
        using gradsync::detail::larger, gradsync::detail::smaller;
        wait_queue.nap(awake, smaller(larger(nap_, waited / 256), longest_nap));
    }

    /// True once spinning is over. From then on, reading the clock and flags costs little in comparison.
    bool patient() const noexcept { return spins_left_ == 0; }

private:
    int spins_left_;
    std::chrono::nanoseconds nap_;
    std::chrono::steady_clock::time_point yielding_since_{};
};

using gradsync::detail::Shared;

/// Why a world ended. Ranks are world ranks.
struct Failure {
    Errc code = Errc::peer_failed;
    int culprit = -1;     ///< world rank to blame; -1: unknown
    std::string message;  ///< text that makes sense on every rank
};

/// Work that one of this rank's threads must do even while it waits for something else: it may wait in one communicator
/// for a rank that waits in another.
class ProgressHook {
public:
    /// Does as much as it can at once; a no-op if another thread is doing it.
    virtual void progress() noexcept = 0;
    /// Call after the world has failed. Returns once the failure was delivered as far
    /// as possible, or a limit has passed.
    virtual void deliver_failure() noexcept {}

protected:
    virtual ~ProgressHook() = default;
};

/// The hooks of all communicators of one rank. Thread-safe.
class ProgressHooks {
public:
    void enlist(ProgressHook& hook) {
        std::lock_guard lock(mutex_);
        hooks_.push_back(&hook);
    }
    void dismiss(ProgressHook& hook) noexcept {
        std::lock_guard lock(mutex_);
        hooks_.erase_if([&](ProgressHook* one) { return one == &hook; });
    }
    void progress() noexcept {
        std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock) return;
        for (ProgressHook* hook : hooks_) hook->progress();
    }
    [[gnu::cold]] void deliver_failure() noexcept {
        std::unique_lock lock(mutex_, std::try_to_lock);  // another thread may be in the hooks for a while
        for (int tries = 0; !lock && tries < 10'000; ++tries) static_cast<void>(lock.try_lock() || ::usleep(100) == 0);
        for (std::size_t i = 0; lock && i < hooks_.size(); ++i) hooks_[i]->deliver_failure();
    }

private:
    std::mutex mutex_;
    List<ProgressHook*> hooks_;
};

/// The state that all communicators of one origin share: the first failure, which ends all of them, the wait queue that
/// wakes their sleepers, and their progress hooks.
class World {
public:
    /// The part in memory that all ranks see: of this process, or mapped by several. Initially zero.
    struct State {
        std::atomic<std::uint32_t> failed{0};  ///< 0: no; odd: being written; even: written
        std::int32_t code = 0;
        std::int32_t culprit = 0;
        char message[1200] = {};
        std::atomic<std::uint64_t> moved{0};
        WaitQueue wait_queue;
    };

    /// `ranks`: number of ranks on this machine. `hooks`: shared with another world of the same rank, if there is one;
    /// null if its communicators need none.
    World(int ranks, Shared<State> state, Shared<ProgressHooks> hooks = {}) noexcept
        : wait_queue(state->wait_queue),
          moved(state->moved),
          cores_are_shared(ranks > cores),
          state_(std::move(state)),
          hooks_(std::move(hooks)) {}
    World& operator=(World&&) = delete;
    virtual ~World() = default;

    /// Records the failure if it is the first, and wakes all sleepers.
    void fail(const Failure& failure) noexcept {
        std::uint32_t seen = 0, own = 1;
        while (!state_->failed.compare_exchange_strong(seen, own, std::memory_order_acquire)) {
            // Writing is quick, unless the writer's process died meanwhile. Then a waiting rank writes its own failure.
            const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
            while (!failed() && std::chrono::steady_clock::now() < deadline) ::sched_yield();
            if (failed()) return;
            own = seen + 2;
        }
        state_->code = static_cast<std::int32_t>(failure.code);
        state_->culprit = failure.culprit;
        state_->message[failure.message.copy(state_->message, sizeof state_->message - 1)] = '\0';
        state_->failed.store(own + 1, std::memory_order_seq_cst);
        wait_queue.ring();
    }

    bool failed() const noexcept {
        const std::uint32_t word = state_->failed.load(std::memory_order_seq_cst);
        return word != 0 && word % 2 == 0;
    }

    /// The first failure; only after `failed()`.
    Failure failure() const { return {static_cast<Errc>(state_->code), state_->culprit, state_->message}; }

    /// Is the process of this world rank alive? Threads of one process always are.
    virtual bool alive(int /*world_rank*/) noexcept { return true; }

    /// Grows whenever messages arrive or have been sent. Waiting ranks stay awake while it grows.
    virtual std::uint64_t arrivals() const noexcept { return 0; }

    /// The state, for another world that must fail with this one.
    const Shared<State>& shared_state() const noexcept { return state_; }

    /// The progress hooks of this rank's communicators, if any.
    ProgressHooks& hooks() const noexcept { return *hooks_; }
    const Shared<ProgressHooks>& shared_hooks() const noexcept { return hooks_; }
    void advance_hooks() const noexcept {
        if (hooks_) hooks_->progress();
    }

    WaitQueue& wait_queue;
    std::atomic<std::uint64_t>& moved;  ///< grows while data moves between ranks of this machine and those of others
    const int cores = gradsync::detail::larger(1, static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)));
    const bool cores_are_shared;  ///< more ranks than cores

private:
    const Shared<State> state_;
    const Shared<ProgressHooks> hooks_;
};

}  // namespace gradsync::inline v0_2::collective
