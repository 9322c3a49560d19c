// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/overlap_policy.hpp"

namespace gradsync::inline v0_2 {

/// Everything happens in `finish()`, unless sharded gradients need memory before.
/// Use it as a baseline, or if nothing can overlap.
struct NoOverlap {
    void attach(BucketLauncher&) {}
    void bucket_full(BucketLauncher&) {}
    void gradients_ready(BucketLauncher&) {}
    void detach() noexcept {}
    std::string describe() const { return "NoOverlap"; }
};

static_assert(OverlapPolicy<NoOverlap>);

}  // namespace gradsync::inline v0_2
