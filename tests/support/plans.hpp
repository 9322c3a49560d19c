// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <numeric>
#include <ostream>
#include <vector>

#include <gradsync/core/bucket_plan.hpp>

namespace gradsync_test {

using Buckets = std::vector<std::vector<std::size_t>>;

/// A plan in a form that is easy to write down and compare.
inline Buckets buckets(const gradsync::BucketPlan& plan) {
    Buckets result;
    for (std::size_t b = 0; b < plan.size(); ++b) result.emplace_back(plan.bucket(b).begin(), plan.bucket(b).end());
    return result;
}

inline std::vector<gradsync::ParameterInfo> floats(const std::vector<std::size_t>& counts) {
    std::vector<gradsync::ParameterInfo> result;
    for (const std::size_t count : counts) result.push_back({.count = count});
    return result;
}

inline std::vector<std::size_t> in_order(std::size_t count) {
    std::vector<std::size_t> order(count);
    std::iota(order.begin(), order.end(), std::size_t{0});
    return order;
}

inline std::vector<std::size_t> reversed(std::size_t count) {
    std::vector<std::size_t> order = in_order(count);
    return {order.rbegin(), order.rend()};
}

}  // namespace gradsync_test
