// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/bucket_plan.hpp"

namespace gradsync::inline v0_2 {

/// One bucket per parameter, launched in `order`: most overlap, most launches. Use it for a few large parameters, or as
/// a baseline for other policies.
struct PerParameter {
    BucketPlan plan(std::span<const ParameterInfo>, std::span<const std::size_t> order) const {
        BucketPlan result;
        for (std::size_t i = 0; i < order.size(); ++i) result.push_back(order.subspan(i, 1));
        return result;
    }

    std::string describe() const { return "PerParameter"; }
};

static_assert(BucketPolicy<PerParameter>);

}  // namespace gradsync::inline v0_2
