// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

namespace gradsync::inline v0_2::detail {

/// When gradients became ready, in the steps that were recorded: the mean over the steps, counted from each step's first.
/// `record` is for any thread; the rest is for one while nobody marks.
class ReadyTimes {
public:
    /// Allocates nothing before `forget`, as most policies do not ask for times.
    void forget(std::size_t parameters) {
        now_.assign(parameters, 0);
        sums_.assign(parameters, 0);
        steps_.assign(parameters, 0);
    }

    void record(std::size_t i, double seconds) noexcept { now_[i] = seconds; }

    /// The step is over in which these were recorded.
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

    /// By parameter; those that were never recorded come with the last of the others. 0 where nothing was recorded at all.
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

/// `order` by these times, of the parameters; as it stands among equal ones.
inline void sort_by_times(std::span<std::uint64_t> order, std::span<const double> times) {
    struct Entry {
        double time;
        std::size_t place;
        std::uint64_t parameter;
    };
    std::vector<Entry> entries(order.size());
    for (std::size_t k = 0; k < order.size(); ++k) entries[k] = {times[order[k]], k, order[k]};
    // Not std::sort, for which <algorithm> would have to be read wherever the library is included.
    std::qsort(entries.data(), entries.size(), sizeof(Entry), [](const void* a, const void* b) {
        const auto &one = *static_cast<const Entry*>(a), &other = *static_cast<const Entry*>(b);
        const bool before = one.time != other.time ? one.time < other.time : one.place < other.place;
        return before ? -1 : 1;
    });
    for (std::size_t k = 0; k < order.size(); ++k) order[k] = entries[k].parameter;
}

}  // namespace gradsync::inline v0_2::detail
