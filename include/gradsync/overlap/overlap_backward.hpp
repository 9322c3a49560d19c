#pragma once

#include <string>

#include "../core/overlap_policy.hpp"

namespace gradsync::inline v0 {

/// A bucket leaves as soon as it is full and its turn has come, and started collectives are advanced from
/// `mark_ready`: no thread is needed. The choice where every core computes, as progress is work there.
struct OverlapBackward {
    void attach(BucketEngine auto&) {}
    void bucket_full(BucketEngine auto& engine) { engine.launch_full_buckets(); }
    void gradients_ready(BucketEngine auto& engine) {
        if (engine.in_flight()) engine.poll();
    }
    void detach() noexcept {}
    std::string describe() const { return "OverlapBackward"; }
};

static_assert(OverlapPolicy<OverlapBackward>);

}  // namespace gradsync::inline v0
