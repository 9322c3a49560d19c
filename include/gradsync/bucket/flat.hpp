// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "assign_buckets.hpp"

namespace gradsync::inline v0_2 {

/// One bucket for each dtype and memory space: fewest launches, but no overlap, because a bucket is launched when its
/// last gradient is ready. Use it if nothing can overlap, or if launches are expensive.
struct Flat {
    BucketPlan plan(std::span<const ParameterInfo> parameters, std::span<const std::size_t> order) const {
        constexpr std::size_t no_cap[] = {SIZE_MAX};
        return detail::assign_buckets(parameters, order, no_cap, false);
    }

    std::string describe() const { return "Flat"; }
};

static_assert(BucketPolicy<Flat>);

}  // namespace gradsync::inline v0_2
