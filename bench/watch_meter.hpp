// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <span>
#include <string_view>

#include <gradsync/observe/timeline.hpp>

namespace bench {

/// A Timeline whose events can be metered: how long it took to keep them, where they happen, in the middle of a step whose
/// data have driven everything else out of the caches. That is the direct cost alone: a watched step less one that is not
/// watched also has what events delay on other ranks and drive out of the caches, but is hard to tell from what steps differ
/// by anyway. While metering is off, an event costs one branch more than the Timeline's.
class WatchMeter final : public gradsync::Observer {
public:
    gradsync::Timeline& timeline() noexcept { return timeline_; }

    /// Not while events come.
    void meter(bool on) noexcept { on_ = on; }
    /// Seconds that were metered since it was asked last. Each event counts one reading of the clock beside what the
    /// Timeline does: the one by which the reducer says when it was.
    double take() noexcept { return std::chrono::duration<double>(Clock::duration(spent_.exchange(0))).count(); }

    void plan(const gradsync::BucketPlan& plan, std::span<const std::size_t> bytes, std::span<const std::string_view> names) override {
        timeline_.plan(plan, bytes, names);
    }
    void ready(std::size_t parameter, Time at) noexcept override {
        metered([&] { timeline_.ready(parameter, at); });
    }
    void begin(gradsync::Activity activity, std::size_t index, Time at) noexcept override {
        metered([&] { timeline_.begin(activity, index, at); });
    }
    void end(gradsync::Activity activity, std::size_t index, Time at) noexcept override {
        metered([&] { timeline_.end(activity, index, at); });
    }

    /// Opens a scope and closes it: how long that takes, in seconds, metering or not.
    double scope_seconds() {
        const auto begin = Clock::now();
        { const auto scope = timeline_.scope("a scope"); }
        return std::chrono::duration<double>(Clock::now() - begin).count();
    }

private:
    using Clock = std::chrono::steady_clock;

    /// From before to after it is as long as `f()` and one reading of the clock.
    template <class F>
    void metered(F&& f) noexcept {
        if (!on_) return f();
        const auto begin = Clock::now();
        f();
        spent_.fetch_add((Clock::now() - begin).count(), std::memory_order_relaxed);
    }

    gradsync::Timeline timeline_;
    bool on_ = false;
    std::atomic<Clock::rep> spent_{0};  // events come from any thread
};

}  // namespace bench
