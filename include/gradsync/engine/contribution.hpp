// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/reduce_op.hpp"
#include "options.hpp"

namespace gradsync::inline v0_2::detail {

/// What a rank brings to the means of a step: every kind of averaging is a mean with the right scales and weights.
/// `weight`: what `set_weight` has set; `has_batch`: what `begin_step` was told.
constexpr Contribution contribution_of(const ReducerOptions& options, int rank, double weight, bool has_batch) noexcept {
    switch (options.averaging) {
        case Averaging::mean:
            return has_batch ? Contribution{1, 1} : Contribution{0, options.divisor == JoinDivisor::all_ranks ? 1.0 : 0.0};
        // A sum is a mean whose weights add up to 1.
        case Averaging::sum: return {has_batch ? 1.0 : 0.0, rank == 0 ? 1.0 : 0.0};
        case Averaging::weighted_mean: return has_batch ? Contribution{weight, weight} : Contribution{0, 0};
        case Averaging::mean_over_count: return has_batch ? Contribution{1, weight} : Contribution{0, 0};
    }
    return {};
}

}  // namespace gradsync::inline v0_2::detail
