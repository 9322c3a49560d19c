// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string>

#include "../core/overlap_policy.hpp"
#include "overlap_backward.hpp"

namespace gradsync::inline v0_2 {

/// `OverlapBackward{Progress::thread}` as a type of its own: the choice where the compute is off the CPU. Among ranks that share memory,
/// on cores that all compute, its thread only takes turns with them.
struct OverlapBackwardThread : OverlapBackward {
    OverlapBackwardThread() noexcept : OverlapBackward(Progress::thread) {}

    std::string describe() const { return "OverlapBackwardThread"; }
};

static_assert(OverlapPolicy<OverlapBackwardThread>);

}  // namespace gradsync::inline v0_2
