// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "../core/parameter.hpp"
#include "readiness.hpp"

/// What the Reducer says of marks that are too many, or missing: sentences for errors.

namespace gradsync::inline v0_2::detail {

inline std::string marked_too_often(const ParameterView& p, std::size_t bucket) {
    if (!p.requires_grad) return "parameter '" + p.name + "' is frozen (requires_grad = false) and takes no marks";
    return "parameter '" + p.name + "' (bucket " + std::to_string(bucket) + ") was marked ready more than " +
           (p.uses == 1 ? "once" : std::to_string(p.uses) + " times") +
           " before finish(); call finish() each step, put micro-batches before the last under no_sync(), or set its `uses` if it is used more often";
}

/// `missing`: indices of the `trainable` parameters whose gradients are not ready.
inline std::string not_ready(std::span<const std::size_t> missing, std::size_t trainable, std::span<const ParameterView> parameters,
                             const Readiness& readiness) {
    constexpr std::size_t named = 5;
    std::string names;
    for (std::size_t k = 0; k < missing.size() && k < named; ++k) {
        const std::size_t i = missing[k];
        const std::uint32_t marks = readiness.uses(i) - readiness.remaining(i);
        names += (k ? ", '" : "'") + parameters[i].name + "' (bucket " + std::to_string(readiness.bucket_of(i)) + ", marked " +
                 std::to_string(marks) + " of " + std::to_string(readiness.uses(i)) + " times)";
    }
    if (missing.size() > named) names += ", ...";
    return std::to_string(missing.size()) + " of " + std::to_string(trainable) + " gradients are not ready: " + names +
           "; mark every trainable parameter before finish(), freeze it, or choose UnusedParameters::agree";
}

}  // namespace gradsync::inline v0_2::detail
