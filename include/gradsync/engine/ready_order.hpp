// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "../core/backend.hpp"
#include "../core/backend_clock.hpp"
#include "../kernel/passes.hpp"
#include "ready_times.hpp"

namespace gradsync::inline v0_2::detail {

/// The order in which gradients become ready in the steps that are recorded and, where the plan goes by them (`timed`), the times;
/// and what the ranks make of it. `record` is for any thread; the rest is for one while nobody marks.
template <bool timed>
class ReadyOrder {
public:
    /// Of the next `steps`, the last one's order counts and the mean of the times.
    void start(unsigned steps, std::size_t parameters) {
        parameters_ = parameters;
        recorded_.resize(parameters);
        forget();
        if constexpr (timed) times_.forget(parameters);
        steps_ = steps;
    }
    /// Is the step that comes, or is under way, one of them?
    bool recording() const noexcept { return steps_ != 0; }

    template <class B>
    void record(std::size_t i, const B& backend) {
        recorded_[count_.fetch_add(1, std::memory_order_relaxed) % recorded_.size()] = i;
        if constexpr (timed) times_.record(i, backend_seconds(backend));
    }
    void end_step() noexcept {
        if constexpr (timed) times_.end_step(recorded());
        if (--steps_ != 0) forget();
    }

    /// The order of what all ranks are to plan by: by the latest times of all ranks, or rank 0's. `present`: those that take part,
    /// as they are planned now; among equals, and those that were not marked, that order stays, and all of it where no rank has recorded
    /// anything. Collective.
    template <class B>
    std::vector<std::uint64_t> agree(B& backend, std::span<const std::size_t> present) {
        std::vector<std::uint64_t> order(present.begin(), present.end());
        if constexpr (timed) {
            std::vector<double> seconds = times_.mean();
            seconds.push_back(times_.any() ? 1 : 0);
            host_of(backend).all_reduce(buffer(seconds), ReduceOp::max).wait();
            if (seconds.back() == 0) return order;
            seconds.pop_back();
            seconds_ = std::move(seconds);
            sort_by_times(order, seconds_);
        } else {
            if (backend.rank() == 0) put_recorded_first(order, present);
            host_of(backend).broadcast(buffer(order), 0).wait();
        }
        return order;
    }

    /// The times that were agreed on: by parameter, in seconds after the first; empty before.
    const std::vector<double>& seconds() const noexcept { return seconds_; }

private:
    void forget() noexcept { count_.store(0, std::memory_order_relaxed); }
    std::span<const std::size_t> recorded() const noexcept {
        const std::size_t n = count_.load(std::memory_order_relaxed);
        return {recorded_.data(), n < recorded_.size() ? n : recorded_.size()};
    }

    void put_recorded_first(std::vector<std::uint64_t>& order, std::span<const std::size_t> present) const {
        std::vector<bool> seen(parameters_);
        std::size_t n = 0;
        for (const std::size_t i : recorded()) {
            order[n++] = i;
            seen[i] = true;
        }
        for (const std::size_t i : present)
            if (!seen[i]) order[n++] = i;
    }

    std::size_t parameters_ = 0;
    std::vector<std::size_t> recorded_;
    std::atomic<std::size_t> count_{0};
    unsigned steps_ = 0;  ///< so many are still to be recorded
    ReadyTimes times_;
    std::vector<double> seconds_;
};

}  // namespace gradsync::inline v0_2::detail
