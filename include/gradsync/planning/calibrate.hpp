// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <vector>

#include "../core/backend.hpp"
#include "cost_model.hpp"

namespace gradsync::inline v0_2::plan {

/// One timed collective.
struct TimedCall {
    double bytes = 0;    ///< of one call
    double seconds = 0;  ///< of one call
};

/// A cost model, and how well it fits the timed calls.
struct Fit {
    CallCost cost;                  ///< the fitted cost
    std::vector<TimedCall> calls;   ///< the times that were fitted
    std::vector<double> residuals;  ///< by call: predicted / measured - 1
    double rms_residual = 0;        ///< root mean square of the relative errors
    double worst_residual = 0;      ///< the largest, without its sign
};

/// Fits `fixed` and `per_byte` by least squares of the relative errors, sum of (predicted / measured - 1)^2, so that
/// calls of bytes and calls of megabytes count alike. Neither is negative: if the best value of one is, it becomes 0
/// and the other is fitted alone. Throws Error(invalid_argument) if there are fewer than two different sizes, a size is
/// negative, or a time is not positive and finite.
inline Fit fit(std::span<const TimedCall> calls) {
    const auto refuse = [](const char* what) {
        gradsync::detail::raise(Errc::invalid_argument, {.operation = "fit"}, what);
    };
    bool differ = false;
    for (const TimedCall& c : calls) {
        if (!(c.seconds > 0) || !gradsync::detail::is_finite(c.seconds) || !(c.bytes >= 0))
            refuse("a timed call must have taken a positive, finite time");
        differ = differ || c.bytes != calls.front().bytes;
    }
    if (!differ) refuse("a fit needs timed calls of at least two sizes");

    // Minimise sum (a u + b v - 1)^2 with u = 1 / t, v = n / t.
    double uu = 0, uv = 0, vv = 0, u1 = 0, v1 = 0;
    for (const TimedCall& c : calls) {
        const double u = 1 / c.seconds, v = c.bytes / c.seconds;
        uu += u * u, uv += u * v, vv += v * v, u1 += u, v1 += v;
    }
    const double determinant = uu * vv - uv * uv;
    Fit result;
    result.cost = {(u1 * vv - v1 * uv) / determinant, (v1 * uu - u1 * uv) / determinant};
    if (result.cost.fixed < 0) result.cost = {0, v1 / vv};
    if (result.cost.per_byte < 0) result.cost = {u1 / uu, 0};

    result.calls.assign(calls.begin(), calls.end());
    double squares = 0;
    for (const TimedCall& c : calls) {
        const double residual = result.cost.seconds(c.bytes) / c.seconds - 1;
        result.residuals.push_back(residual);
        squares += residual * residual;
        result.worst_residual = gradsync::detail::larger(result.worst_residual, residual < 0 ? -residual : residual);
    }
    result.rms_residual = gradsync::detail::square_root(squares / static_cast<double>(calls.size()));
    return result;
}

/// The sizes and numbers of calls that `calibrate` times.
struct CalibrationOptions {
    std::size_t min_bytes = 1024;                   ///< the smallest size; sizes grow fourfold
    std::size_t max_bytes = std::size_t{64} << 20;  ///< the limit of sizes
    double longest_call = 0.25;  ///< seconds; a size whose calls take longer is the last (but two are always measured)
    std::size_t burst_bytes = std::size_t{2} << 20;  ///< the bytes of a burst of calls, which is timed as a whole
    int max_in_flight = 64;                          ///< the limit of calls per burst
    int warm_up = 1;                                 ///< bursts per size that are not counted
    int bursts = 5;                                  ///< timed bursts per size; their median counts
};

/// Measures the cost of an all-reduce on this backend: f32 sums of several sizes, in memory of `allocate`. Small calls
/// are started many at a time, as in a backward; the cost of a call is the time of the burst divided by its calls. Each
/// rank takes the median of a size, and all ranks take the largest of their medians. Every rank thus gets the same
/// numbers and makes the same plans. Collective. Throws Error(invalid_argument) if the options make fewer than two
/// sizes or are otherwise invalid, and if there is only one rank.
///
/// Nothing else should run at the same time: the result is the cost on an idle link. If ranks compute on the cores that
/// move the bytes, a call during a backward takes longer.
template <Backend B>
Fit calibrate(B backend, const CalibrationOptions& options = {}) {
    const auto refuse = [&](const char* what) { gradsync::detail::refuse({"calibrate", backend.rank()}, what); };
    if (backend.size() < 2) refuse("one rank alone communicates nothing; start at least 2");
    if (options.min_bytes < sizeof(float) || options.max_bytes / 4 < options.min_bytes || options.warm_up < 0 ||
        options.bursts < 1 || options.max_in_flight < 1)
        refuse(
            "min_bytes must be at least 4 and max_bytes four times as much, warm_up at least 0, bursts and "
            "max_in_flight at least 1");

    const auto most_calls = static_cast<std::size_t>(options.max_in_flight);
    auto memory = backend.allocate(gradsync::detail::larger(options.max_bytes, options.burst_bytes));
    std::vector<TimedCall> timed;
    std::vector<double> seconds(static_cast<std::size_t>(options.bursts));
    std::vector<typename B::WorkType> works;
    for (std::size_t bytes = options.min_bytes;; bytes *= 4) {
        const std::size_t calls = gradsync::detail::larger<std::size_t>(
            1, gradsync::detail::smaller(options.burst_bytes / bytes, most_calls));
        const BufferView whole{static_cast<float*>(memory.data()), bytes / sizeof(float) * calls, B::memory_space};
        for (int i = -options.warm_up; i < options.bursts; ++i) {
            backend.barrier().wait();
            const double begin = backend_seconds(backend);
            for (std::size_t k = 0; k < calls; ++k)
                works.push_back(backend.all_reduce(whole.subview(k * (bytes / sizeof(float)), bytes / sizeof(float)),
                                                   ReduceOp::sum));
            for (auto& work : works) work.wait();
            works.clear();
            if (i >= 0)
                seconds[static_cast<std::size_t>(i)] = (backend_seconds(backend) - begin) / static_cast<double>(calls);
        }
        gradsync::detail::sort_by(seconds, [](double a, double b) { return a < b; });
        double median = seconds[seconds.size() / 2];
        const auto agree = [&](auto& host) {
            host.all_reduce(gradsync::buffer(std::span(&median, 1)), ReduceOp::max).wait();
        };
        if constexpr (B::memory_space == MemorySpace::host) agree(backend);
        else agree(backend.host());
        timed.push_back({static_cast<double>(bytes / sizeof(float) * sizeof(float)), median});
        if (bytes > options.max_bytes / 4 || (median > options.longest_call && timed.size() > 1)) break;
    }
    return fit(timed);
}

}  // namespace gradsync::inline v0_2::plan
