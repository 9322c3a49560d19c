// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "overlap_backward.hpp"

namespace gradsync::inline v0_2 {

/// Launches buckets in the backward as `OverlapBackward` does, but as reduce-scatters. `finish()` starts the other half
/// of the all-reduce, the all-gathers, which overlap with the next forward. Before you use parameter i there, call
/// `acquire(i)` on what `finish()` has returned (Reducer; then step this parameter) or `wait_parameter(i)`
/// (ShardedOptimizer).
///
/// Use it if the network is slow and the backward alone does not hide the communication (DeAR, arXiv 2302.12445).
struct OverlapForward : OverlapBackward {
    /// Chooses how collectives advance.
    using OverlapBackward::OverlapBackward;
    static constexpr bool gathers_in_forward = true;

    std::string describe() const { return describe_as("OverlapForward"); }
};

static_assert(OverlapPolicy<OverlapForward>);

}  // namespace gradsync::inline v0_2
