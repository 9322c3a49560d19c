// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

#include <nlohmann/json.hpp>

#include "report.hpp"

namespace gradsync_train {

/// What `gradsync_plan buckets --profile` reads.
inline nlohmann::json json_of(const BucketProfile& profile) {
    nlohmann::json result{{"fixed", profile.fixed}, {"per_byte", profile.per_byte}};
    for (std::size_t i = 0; i < profile.ready.size(); ++i)
        result["gradients"].push_back({{"ready", profile.ready[i]}, {"bytes", profile.bytes[i]}});
    return result;
}

}  // namespace gradsync_train
