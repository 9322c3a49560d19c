// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "../core/backend.hpp"
#include "../core/backend_clock.hpp"
#include "../core/buffer_view.hpp"
#include "../core/error.hpp"
#include "../core/math.hpp"
#include "fit.hpp"

namespace gradsync::inline v0_2::plan {

struct CalibrationOptions {
    std::size_t min_bytes = 1024;                    ///< the smallest size; sizes grow fourfold
    std::size_t max_bytes = std::size_t{64} << 20;   ///< the limit of sizes
    double longest_call = 0.25;                      ///< seconds; a size whose calls take longer is the last, after two at least
    std::size_t burst_bytes = std::size_t{2} << 20;  ///< the bytes of a burst of calls, which is timed as a whole
    int max_in_flight = 64;                          ///< the limit of calls per burst
    int warm_up = 1;                                 ///< bursts per size that are not counted
    int bursts = 5;                                  ///< timed bursts per size; their median counts
};

/// Measures the cost of an all-reduce on this backend: f32 sums of several sizes, in memory of `allocate`. Small calls are started many at
/// a time, as in a backward; the cost of a call is the time of the burst divided by its calls. Each rank takes the median of a size, and
/// all ranks take the largest of their medians. Every rank thus gets the same numbers and makes the same plans. Collective. Throws
/// Error(invalid_argument) if the options make fewer than two sizes or are otherwise invalid, and if there is only one rank.
///
/// Nothing else should run at the same time: the result is the cost on an idle link. If ranks compute on the cores that move the bytes, a
/// call during a backward takes longer.
template <Backend B>
Fit calibrate(B backend, const CalibrationOptions& options = {}) {
    const auto refuse = [&](const char* what) { gradsync::detail::refuse("calibrate", what, backend.rank()); };
    if (backend.size() < 2) refuse("one rank alone communicates nothing; start at least 2");
    if (options.min_bytes < sizeof(float) || options.max_bytes / 4 < options.min_bytes || options.warm_up < 0 || options.bursts < 1 ||
        options.max_in_flight < 1)
        refuse("min_bytes must be at least 4 and max_bytes four times as much, warm_up at least 0, bursts and max_in_flight at least 1");

    const auto calls_of = [&](std::size_t bytes) {
        const std::size_t calls = options.burst_bytes / bytes;
        return gradsync::detail::larger<std::size_t>(1, gradsync::detail::smaller(calls, static_cast<std::size_t>(options.max_in_flight)));
    };
    auto memory = backend.allocate(gradsync::detail::larger(options.max_bytes, options.burst_bytes));
    std::vector<TimedCall> timed;
    std::vector<double> seconds(static_cast<std::size_t>(options.bursts));
    std::vector<typename B::WorkType> works;
    for (std::size_t bytes = options.min_bytes;; bytes *= 4) {
        const BufferView whole{static_cast<float*>(memory.data()), bytes / sizeof(float) * calls_of(bytes), B::memory_space};
        for (int i = -options.warm_up; i < options.bursts; ++i) {
            backend.barrier().wait();
            const double begin = backend_seconds(backend);
            for (std::size_t k = 0; k < calls_of(bytes); ++k)
                works.push_back(backend.all_reduce(whole.subview(k * (bytes / sizeof(float)), bytes / sizeof(float)), ReduceOp::sum));
            for (auto& work : works) work.wait();
            works.clear();
            if (i >= 0) seconds[static_cast<std::size_t>(i)] = (backend_seconds(backend) - begin) / static_cast<double>(calls_of(bytes));
        }
        for (std::size_t i = 1; i < seconds.size(); ++i)  // sorted: there are few
            for (std::size_t k = i; k > 0 && seconds[k] < seconds[k - 1]; --k) std::swap(seconds[k], seconds[k - 1]);
        double median = seconds[seconds.size() / 2];
        const auto agree = [&](auto& host) { host.all_reduce(gradsync::buffer(std::span(&median, 1)), ReduceOp::max).wait(); };
        if constexpr (B::memory_space == MemorySpace::host) agree(backend);
        else agree(backend.host());
        timed.push_back({static_cast<double>(bytes / sizeof(float) * sizeof(float)), median});
        if (bytes > options.max_bytes / 4 || (median > options.longest_call && timed.size() > 1)) break;
    }
    return fit(timed);
}

}  // namespace gradsync::inline v0_2::plan
