// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../kernel/passes.hpp"

namespace gradsync::inline v0_2::detail {

/// The times of marks on the host's clock.
class HostStamps {
public:
    explicit HostStamps(BackendClock clock) noexcept : clock_(clock) {}
    void resize(std::size_t count) { seconds_.resize(count); }
    void set(std::size_t i) { seconds_[i] = clock_.seconds(); }
    double seconds_between(std::size_t first, std::size_t i) { return seconds_[i] - seconds_[first]; }

private:
    BackendClock clock_;
    List<double> seconds_;
};

/// On a device a gradient is ready when the device reaches its mark.
auto stamps_of(Backend auto& backend) {
    if constexpr (requires { passes_of(backend).stamps(); }) return passes_of(backend).stamps();
    else return HostStamps(BackendClock(backend));
}

/// Records the order in which gradients become ready, and the times if the plan needs them (`timed`); then the ranks
/// agree on one order. `record` is thread-safe; call the rest from one thread, while no thread marks.
template <Backend B>
class ReadyOrder {
public:
    ReadyOrder(B& backend, bool timed) : stamps_(stamps_of(backend)), timed_(timed) {}

    /// Records `steps` steps: the order of the last one, and the mean of the times.
    void start(unsigned steps, std::size_t parameters) {
        recorded_.resize(parameters);
        forget();
        steps_ = steps;
        if (!timed_) return;
        stamps_.resize(parameters);
        sums_ = List<double>(parameters);
        counts_ = List<std::uint32_t>(parameters);
    }
    /// Is the current or next step recorded?
    bool recording() const noexcept { return steps_ != 0; }

    void record(std::size_t i) {
        recorded_[count_.fetch_add(1, std::memory_order_relaxed) % recorded_.size()] = i;
        if (timed_) stamps_.set(i);
    }
    /// Forgets what was recorded of the current step.
    void forget() noexcept { count_.store(0, std::memory_order_relaxed); }
    /// Waits for the device, if there is one.
    void end_step() {
        if (timed_) add_up_times();
        if (--steps_ != 0) forget();
    }

    /// The order by which all ranks plan: by the latest times over all ranks if `timed`, otherwise rank 0's order.
    /// `present`: the parameters that take part, in the order of the current plan. That order decides among equal times
    /// and for gradients that were not marked, and stays if nothing was recorded. `share(view)` gives the first group's
    /// numbers to all groups that plan alike. Collective.
    List<std::uint64_t> agree(B& backend, std::span<const std::size_t> present, auto&& share) {
        List<std::uint64_t> order(present.size());
        for (std::size_t k = 0; k < present.size(); ++k) order[k] = present[k];
        if (timed_) {
            List<double> seconds = mean_times();
            // No time is negative, so they compare as their bits do. A maximum in f64 would compile the loops of f64
            // into every program.
            List<std::uint64_t> bits(seconds.size());
            for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = std::bit_cast<std::uint64_t>(seconds[i]);
            host_of(backend).all_reduce(BufferView(bits.data(), bits.size()), ReduceOp::max).wait();
            share(BufferView(bits.data(), bits.size()));
            for (std::size_t i = 0; i < bits.size(); ++i) seconds[i] = std::bit_cast<double>(bits[i]);
            if (seconds.back() == 0) return order;
            seconds.resize(seconds.size() - 1);
            seconds_ = std::move(seconds);
            sort_by(order, [&](std::uint64_t one, std::uint64_t other) { return seconds_[one] < seconds_[other]; });
        } else {
            List<std::size_t> place(recorded_.size(), recorded_.size());  // those without a mark keep their order
            for (std::size_t k = 0; k < recorded().size(); ++k) place[recorded()[k]] = k;
            sort_by(order, [&](std::uint64_t one, std::uint64_t other) { return place[one] < place[other]; });
            host_of(backend).broadcast(BufferView(order.data(), order.size()), 0).wait();
            share(BufferView(order.data(), order.size()));
        }
        return order;
    }

    /// The times that the ranks agreed on: by parameter, in seconds after the first gradient; empty before `agree`.
    const List<double>& seconds() const noexcept { return seconds_; }

private:
    /// Times count from the first gradient of a step.
    void add_up_times() {
        double first = 0;
        for (const std::size_t i : recorded()) first = smaller(first, stamps_.seconds_between(recorded().front(), i));
        for (const std::size_t i : recorded()) {
            sums_[i] += stamps_.seconds_between(recorded().front(), i) - first;
            ++counts_[i];
        }
    }
    /// By parameter. A gradient that was never recorded gets the time of the last one. The extra element at the end is
    /// 1 if anything was recorded.
    List<double> mean_times() const {
        List<double> times(sums_);
        double last = 0, any = 0;
        for (std::size_t i = 0; i < times.size(); ++i) {
            if (counts_[i] == 0) continue;
            times[i] /= counts_[i];
            last = larger(last, times[i]);
            any = 1;
        }
        for (std::size_t i = 0; i < times.size(); ++i)
            if (counts_[i] == 0) times[i] = last;
        times.push_back(any);
        return times;
    }

    std::span<const std::size_t> recorded() const noexcept {
        const std::size_t n = count_.load(std::memory_order_relaxed);
        return {recorded_.data(), n < recorded_.size() ? n : recorded_.size()};
    }

    decltype(stamps_of(std::declval<B&>())) stamps_;  ///< by parameter, of the current step; only if `timed`
    bool timed_;
    List<std::size_t> recorded_;
    std::atomic<std::size_t> count_{0};
    unsigned steps_ = 0;          ///< number of steps still to be recorded
    List<double> sums_;           ///< by parameter, in seconds; only if `timed`
    List<std::uint32_t> counts_;  ///< by parameter: recorded steps in which it became ready
    List<double> seconds_;
};

}  // namespace gradsync::inline v0_2::detail
