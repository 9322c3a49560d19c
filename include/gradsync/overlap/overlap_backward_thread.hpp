#pragma once

#include <condition_variable>
#include <memory>
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
    OverlapBackwardThread(OverlapBackwardThread&&) = default;
    OverlapBackwardThread& operator=(OverlapBackwardThread&&) = delete;
    ~OverlapBackwardThread() { detach(); }

    template <BucketEngine Engine>
    void attach(Engine& engine) {
        state_ = std::make_unique<State>();
        state_->thread = std::thread([&engine, &state = *state_] {
            std::unique_lock lock(state.mutex);
            for (;;) {
                state.wake.wait(lock, [&] { return state.stop || state.work; });
                if (state.stop) return;
                state.work = false;
                lock.unlock();
                try {
                    while (engine.in_flight() && !stopping(state)) {
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
        {
            std::lock_guard lock(state_->mutex);
            state_->work = true;
        }
        state_->wake.notify_one();
    }

    void gradients_ready(BucketEngine auto&) {}

    void detach() noexcept {
        if (!state_) return;
        {
            std::lock_guard lock(state_->mutex);
            state_->stop = true;
        }
        state_->wake.notify_one();
        state_->thread.join();
        state_.reset();
    }

    std::string describe() const { return "OverlapBackwardThread"; }

private:
    struct State {
        std::mutex mutex;
        std::condition_variable wake;
        bool work = false;
        bool stop = false;
        std::thread thread;
    };

    static bool stopping(State& state) {
        std::lock_guard lock(state.mutex);
        return state.stop;
    }

    std::unique_ptr<State> state_;  // at a fixed address, for the thread
};

static_assert(OverlapPolicy<OverlapBackwardThread>);

}  // namespace gradsync::inline v0
