// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "buffer_view.hpp"

namespace gradsync::inline v0_2 {

/// What a bucket policy knows of a parameter: everything but its memory.
struct ParameterInfo {
    std::size_t count = 0;     ///< elements
    DType dtype = DType::f32;  ///< of the bucket that it will lie in
    MemorySpace space = MemorySpace::host;
    DType value_dtype = DType::f32;  ///< of its values, where buckets of these travel, too (sharding); else f32, whatever they are
    /// Alone in a bucket it travels in the trainer's own memory, for less than a copy into a larger bucket and out of it would cost.
    bool cheaper_alone = false;

    constexpr std::size_t bytes() const noexcept { return count * size_of(dtype); }

    /// Parameters of one kind may share a bucket: what differs in neither type nor place. Less than `kind_count`.
    constexpr std::size_t kind() const noexcept {
        return (static_cast<std::size_t>(dtype) * dtype_count + static_cast<std::size_t>(value_dtype)) * 2 +
               static_cast<std::size_t>(space);
    }
    static constexpr std::size_t kind_count = dtype_count * dtype_count * 2;
};

/// Which parameters travel together. Bucket b holds `bucket(b)`, indices of parameters in the order in which
/// they lie in its buffer; buckets stand in the order in which they are launched, the same on all ranks.
class BucketPlan {
public:
    /// Appends a bucket with these parameters.
    void push_back(std::span<const std::size_t> parameters) {
        for (const std::size_t i : parameters) parameters_.push_back(i);
        ends_.push_back(parameters_.size());
    }

    std::size_t size() const noexcept { return ends_.size(); }
    bool empty() const noexcept { return ends_.empty(); }

    std::span<const std::size_t> bucket(std::size_t b) const noexcept {
        const std::size_t first = b == 0 ? 0 : ends_[b - 1];
        return {parameters_.data() + first, ends_[b] - first};
    }

    friend bool operator==(const BucketPlan&, const BucketPlan&) = default;

private:
    std::vector<std::size_t> parameters_;
    std::vector<std::size_t> ends_;
};

/// Decides which gradients travel together.
///
/// `plan(parameters, order)` is a pure function, no communication: `order` lists the indices of the parameters
/// that take part, in the order in which their gradients are expected to become ready; each of them stands in
/// exactly one bucket of the result. A bucket holds parameters of one `ParameterInfo::kind()`. `describe()` names the
/// policy and its numbers; the ranks compare it at construction.
template <class P>
concept BucketPolicy =
    std::copy_constructible<P> && requires(const P& policy, std::span<const ParameterInfo> parameters, std::span<const std::size_t> order) {
        { policy.plan(parameters, order) } -> std::same_as<BucketPlan>;
        { policy.describe() } -> std::convertible_to<std::string>;
    };

/// A bucket policy that can plan from when gradients become ready: `set_ready_seconds(times)` takes seconds by parameter, from
/// any moment on, the same numbers on all ranks; plans that are made later go by them. A Reducer measures them: see
/// `Reducer::rebuild_buckets`.
template <class P>
concept TimedBucketPolicy =
    BucketPolicy<P> && requires(P& policy, std::vector<double> times) { policy.set_ready_seconds(std::move(times)); };

}  // namespace gradsync::inline v0_2
