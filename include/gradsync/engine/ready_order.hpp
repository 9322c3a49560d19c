// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <utility>
#include <vector>

#include "../core/backend.hpp"
#include "../core/backend_clock.hpp"
#include "../kernel/passes.hpp"

namespace gradsync::inline v0_2::detail {

/// The times at which gradients became ready in the recorded steps: means over the steps, counted from the first gradient of each step, in
/// seconds. `record` is for any thread; the rest is for one thread while no marks are under way.
class ReadyTimes {
public:
    /// Starts anew. Nothing is allocated before, as most policies need no times.
    void forget(std::size_t parameters) {
        now_.assign(parameters, 0);
        sums_.assign(parameters, 0);
        steps_.assign(parameters, 0);
    }

    void record(std::size_t i, double seconds) noexcept { now_[i] = seconds; }

    /// Ends a step in which the gradients `recorded` were recorded.
    void end_step(std::span<const std::size_t> recorded) noexcept {
        if (recorded.empty()) return;
        double first = now_[recorded.front()];
        for (const std::size_t i : recorded) first = now_[i] < first ? now_[i] : first;
        for (const std::size_t i : recorded) {
            sums_[i] += now_[i] - first;
            ++steps_[i];
        }
    }

    /// Has anything been recorded?
    bool any() const noexcept {
        for (const std::uint32_t steps : steps_)
            if (steps != 0) return true;
        return false;
    }

    /// By parameter. A gradient that was never recorded gets the time of the last one; all are 0 if nothing was recorded.
    std::vector<double> mean() const {
        std::vector<double> times(sums_);
        double last = 0;
        for (std::size_t i = 0; i < times.size(); ++i) {
            if (steps_[i] != 0) times[i] /= steps_[i];
            last = times[i] > last ? times[i] : last;
        }
        for (std::size_t i = 0; i < times.size(); ++i)
            if (steps_[i] == 0) times[i] = last;
        return times;
    }

private:
    std::vector<double> now_, sums_;
    std::vector<std::uint32_t> steps_;
};

/// Sorts `order` by these times, which are by parameter. The sort is stable.
inline void sort_by_times(std::span<std::uint64_t> order, std::span<const double> times) {
    struct Entry {
        double time;
        std::size_t place;
        std::uint64_t parameter;
    };
    std::vector<Entry> entries(order.size());
    for (std::size_t k = 0; k < order.size(); ++k) entries[k] = {times[order[k]], k, order[k]};
    // Not std::sort: <algorithm> would slow every compilation that includes the library.
    std::qsort(entries.data(), entries.size(), sizeof(Entry), [](const void* a, const void* b) {
        const auto &one = *static_cast<const Entry*>(a), &other = *static_cast<const Entry*>(b);
        const bool before = one.time != other.time ? one.time < other.time : one.place < other.place;
        return before ? -1 : 1;
    });
    for (std::size_t k = 0; k < order.size(); ++k) order[k] = entries[k].parameter;
}

/// Records the order in which gradients become ready, and if the plan needs them (`timed`) the times; then the ranks agree on one order.
/// `record` is for any thread; the rest is for one thread while no marks are under way.
class ReadyOrder {
public:
    ReadyOrder(BackendClock clock, bool timed) noexcept : clock_(clock), timed_(timed) {}

    /// Records `steps` steps: the order of the last one, and the mean of the times.
    void start(unsigned steps, std::size_t parameters) {
        parameters_ = parameters;
        recorded_.resize(parameters);
        forget();
        if (timed_) times_.forget(parameters);
        steps_ = steps;
    }
    /// Is the current or coming step recorded?
    bool recording() const noexcept { return steps_ != 0; }

    void record(std::size_t i) {
        recorded_[count_.fetch_add(1, std::memory_order_relaxed) % recorded_.size()] = i;
        if (timed_) times_.record(i, clock_.seconds());
    }
    void end_step() noexcept {
        if (timed_) times_.end_step(recorded());
        if (--steps_ != 0) forget();
    }

    /// The order by which all ranks plan: by the latest times of all ranks if `timed`, otherwise rank 0's order. `present`: the parameters
    /// that take part, in the order of the current plan. That order decides among equal times and for gradients that were not marked, and
    /// stays if nothing was recorded. Collective.
    template <class B>
    std::vector<std::uint64_t> agree(B& backend, std::span<const std::size_t> present) {
        std::vector<std::uint64_t> order(present.begin(), present.end());
        if (timed_) {
            std::vector<double> seconds = times_.mean();
            seconds.push_back(times_.any() ? 1 : 0);
            // None is negative, so that they compare as their bits do. The loops of f64 would have to be compiled for f64.
            const BufferView bits{reinterpret_cast<std::uint64_t*>(seconds.data()), seconds.size()};
            host_of(backend).all_reduce(bits, ReduceOp::max).wait();
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

    /// The times that the ranks agreed on: by parameter, in seconds after the first; empty before.
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

    BackendClock clock_;
    bool timed_;
    std::size_t parameters_ = 0;
    std::vector<std::size_t> recorded_;
    std::atomic<std::size_t> count_{0};
    unsigned steps_ = 0;  ///< number of steps still to be recorded
    ReadyTimes times_;
    std::vector<double> seconds_;
};

}  // namespace gradsync::inline v0_2::detail
