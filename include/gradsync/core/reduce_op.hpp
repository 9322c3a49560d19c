// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "text.hpp"

namespace gradsync::inline v0_2 {

/// How a reduction combines the ranks' elements. `mean` is for floating types only.
enum class ReduceOp : std::uint8_t { sum, min, max, product, mean };

constexpr std::string_view name_of(ReduceOp op) noexcept {
    return detail::name_in({"sum", "min", "max", "product", "mean"}, op);
}

/// One rank's factors in a `ReduceOp::mean`. The result is sum_r scale_r x_r / sum_r weight_r, in the accumulator's
/// precision, rounded once.
///
/// - `{1, 1}` on every rank: the plain mean.
/// - `{w, w}`: the mean of local means, weighted by each rank's number of samples or tokens.
/// - `{1, n}`: local *sums* over n samples or micro-batches, divided by their total number.
/// - `{0, 0}`: this rank has no data, and the mean is over the ranks that have some.
/// - `{0, 1}`: this rank has no data, but counts in the divisor.
///
/// If a rank's scale is 0, its buffer is not read: no value in it influences the result, not even a NaN.
/// If all weights are 0, the result is 0.
struct Contribution {
    double scale = 1;   ///< multiplies this rank's elements
    double weight = 1;  ///< counts in the divisor

    friend constexpr bool operator==(Contribution, Contribution) = default;
};

}  // namespace gradsync::inline v0_2
