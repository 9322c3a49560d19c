// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <span>
#include <vector>

#include "../core/error.hpp"
#include "../core/math.hpp"
#include "cost_model.hpp"

namespace gradsync::inline v0_2::plan {

/// One timed collective.
struct TimedCall {
    double bytes = 0;
    double seconds = 0;
};

/// A cost model, and how well it fits the calls that it was made of.
struct Fit {
    CallCost cost;
    std::vector<TimedCall> calls;
    std::vector<double> residuals;  ///< by call: predicted / measured - 1
    double rms_residual = 0;
    double worst_residual = 0;  ///< the largest, without its sign
};

/// Fits `fixed` and `per_byte` by least squares of the relative errors, sum of (predicted / measured - 1)^2, so that calls of bytes and
/// calls of megabytes count alike. Neither is negative: if the best value of one is, it becomes 0 and the other is fitted alone. Throws
/// Error(invalid_argument) if there are fewer than two different sizes, a size is negative, or a time is not positive and finite.
inline Fit fit(std::span<const TimedCall> calls) {
    const auto refuse = [](const char* what) { throw Error(Errc::invalid_argument, what, {.operation = "fit"}); };
    bool differ = false;
    for (const TimedCall& c : calls) {
        if (!(c.seconds > 0) || !gradsync::detail::is_finite(c.seconds) || !(c.bytes >= 0))
            refuse("a timed call must have taken a positive, finite time");
        differ = differ || c.bytes != calls.front().bytes;
    }
    if (!differ) refuse("a line needs timed calls of at least two sizes");

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

}  // namespace gradsync::inline v0_2::plan
