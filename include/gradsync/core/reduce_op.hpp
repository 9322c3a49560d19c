// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace gradsync::inline v0_2 {

/// How a reduction combines the ranks' elements. `mean` is for floating types only.
enum class ReduceOp : std::uint8_t { sum, min, max, product, mean };

constexpr std::string_view name_of(ReduceOp op) noexcept {
    constexpr std::string_view names[] = {"sum", "min", "max", "product", "mean"};
    return names[static_cast<std::size_t>(op)];
}

/// What one rank brings to a `ReduceOp::mean`: the result is  sum_r scale_r x_r / sum_r weight_r,  in the
/// accumulator's precision, rounded once.
///
/// - `{1, 1}` on every rank: the plain mean.
/// - `{w, w}`: the mean of local means, weighted by each rank's number of samples or tokens.
/// - `{1, n}`: local *sums* over n samples or micro-batches, divided by their total number.
/// - `{0, 0}`: this rank has no data, and the mean is over those that have; `{0, 1}`: it counts in the divisor.
///
/// A rank whose scale is 0 is not read at all: whatever its buffer holds, NaN too, has no influence.
/// Where all weights are 0 the result is 0.
struct Contribution {
    double scale = 1;
    double weight = 1;

    friend constexpr bool operator==(Contribution, Contribution) = default;
};

}  // namespace gradsync::inline v0_2
