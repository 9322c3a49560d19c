// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <utility>
#include <vector>

#include "../core/backend.hpp"
#include "../core/clock.hpp"
#include "../core/error.hpp"
#include "../observe/statistics.hpp"

namespace gradsync::inline v0_2::detail {

/// The collectives of the buckets of one step: started in order, completed in order, with their times. One thread at a time calls `start`;
/// one thread at a time, possibly another, calls `poll` and `wait`.
template <Work W>
class BucketsInFlight {
public:
    using Clock = std::chrono::steady_clock;

    explicit BucketsInFlight(std::size_t buckets) : buckets_(buckets) {}

    std::size_t size() const noexcept { return buckets_.size(); }
    std::size_t started() const noexcept { return started_.load(std::memory_order_acquire); }
    std::size_t completed() const noexcept { return completed_.load(std::memory_order_acquire); }
    bool in_flight() const noexcept { return completed() < started(); }

    /// Takes the collective of the next bucket, which was started at `when`.
    void start(W work, Clock::time_point when) noexcept {
        const std::size_t b = started_.load(std::memory_order_relaxed);
        buckets_[b].work = std::move(work);
        buckets_[b].launch = when;
        started_.store(b + 1, std::memory_order_release);
    }

    /// Advances the collectives; never blocks. Calls `land(b)`, which returns the time of completion, for each bucket that is found
    /// complete.
    template <class Land>
    void poll(Land&& land) {
        for (std::size_t b = completed(); b < started() && naming_bucket(b, [&] { return poll_work(buckets_[b].work); }); ++b)
            complete(b, land);
    }

    /// Tests the first collective that is not complete. Repeated tests time out.
    void test_first() {
        if (in_flight()) naming_bucket(completed(), [&] { return buckets_[completed()].work.test(); });
    }

    /// Waits for the collective of bucket b with `await(work)`. All buckets before b must be known to be complete.
    template <class Land, class Await>
    void wait(std::size_t b, Land&& land, Await&& await) {
        naming_bucket(b, [&] { await(buckets_[b].work); });
        complete(b, land);
    }

    /// Adapts to a new plan. Nothing may be in flight.
    void resize(std::size_t buckets) { buckets_.resize(buckets); }

    /// Resets for the next step, once this one is complete.
    void reset() noexcept {
        started_.store(0, std::memory_order_relaxed);
        completed_.store(0, std::memory_order_relaxed);
    }

    /// Seconds since the first start.
    double launch_seconds(std::size_t b) const noexcept { return seconds(buckets_[b].launch - buckets_[0].launch); }
    double end_seconds(std::size_t b) const noexcept { return seconds(buckets_[b].end - buckets_[0].launch); }

private:
    static double seconds(Clock::duration d) noexcept { return std::chrono::duration<double>(d).count(); }

    struct Bucket {
        W work;
        Clock::time_point launch, end;
    };

    template <class Land>
    void complete(std::size_t b, Land&& land) {
        buckets_[b].end = land(b);
        completed_.store(b + 1, std::memory_order_release);
    }

    std::vector<Bucket> buckets_;
    std::atomic<std::size_t> started_{0};
    std::atomic<std::size_t> completed_{0};
};

}  // namespace gradsync::inline v0_2::detail
