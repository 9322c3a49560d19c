// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "buffer_view.hpp"
#include "list.hpp"

namespace gradsync::inline v0_2 {

/// A parameter as a bucket policy sees it: everything but its memory.
struct ParameterInfo {
    std::size_t count = 0;                  ///< elements
    DType dtype = DType::f32;               ///< type of its gradient in the bucket
    MemorySpace space = MemorySpace::host;  ///< where its gradient is
    /// Type of its values, if buckets of values travel too (sharding); otherwise always f32.
    DType value_dtype = DType::f32;
    /// A hint, which a policy may ignore: alone in a bucket it travels in the trainer's own memory, which costs less
    /// than copies into a larger bucket and back.
    bool cheaper_alone = false;
    bool whole = false;  ///< has one owner; see WholeParameters

    /// Returns the bytes of its gradient.
    constexpr std::size_t bytes() const noexcept { return count * size_of(dtype); }

    /// Parameters with the same types and memory space are of one kind, and may share a bucket, but whole ones only
    /// with whole ones. Less than `kind_count`.
    constexpr std::size_t kind() const noexcept {
        return (static_cast<std::size_t>(dtype) * dtype_count + static_cast<std::size_t>(value_dtype)) * 4 +
               static_cast<std::size_t>(space) * 2 + whole;
    }
    static constexpr std::size_t kind_count = dtype_count * dtype_count * 4;  ///< the number of kinds
};

/// The assignment of parameters to buckets. `bucket(b)` lists the indices of bucket b's parameters in buffer order.
/// Buckets are in launch order, the same on all ranks.
class BucketPlan {
public:
    /// Appends a bucket with these parameters.
    void push_back(std::span<const std::size_t> parameters) {
        for (const std::size_t i : parameters) parameters_.push_back(i);
        ends_.push_back(parameters_.size());
    }

    std::size_t size() const noexcept { return ends_.size(); }  ///< Returns the number of buckets.
    bool empty() const noexcept { return ends_.empty(); }       ///< Returns whether there are no buckets.

    /// Returns the indices of bucket b's parameters.
    std::span<const std::size_t> bucket(std::size_t b) const noexcept {
        const std::size_t first = b == 0 ? 0 : ends_[b - 1];
        return {parameters_.data() + first, ends_[b] - first};
    }

    friend bool operator==(const BucketPlan&, const BucketPlan&) = default;

private:
    List<std::size_t> parameters_, ends_;
};

/// Decides which gradients travel together.
///
/// - `plan(parameters, order)` is a pure function and must not communicate. `order` lists the indices of the parameters
///   that take part, in the order in which their gradients are expected to become ready. The result has each of them in
///   exactly one bucket, and no empty bucket. All parameters of a bucket are of one `ParameterInfo::kind()`, and in the
///   order of `order`. Buckets are sorted by the place of their last parameter in `order`.
/// - `describe()` names the policy and its numbers; the ranks compare it at construction.
template <class P>
concept BucketPolicy =
    std::copy_constructible<P> &&
    requires(const P& policy, std::span<const ParameterInfo> parameters, std::span<const std::size_t> order) {
        { policy.plan(parameters, order) } -> std::same_as<BucketPlan>;
        { policy.describe() } -> std::convertible_to<std::string>;
    };

/// A bucket policy that plans by the times at which gradients become ready. `set_ready_seconds(times)` takes seconds by
/// parameter, from an unspecified origin, the same numbers on all ranks. Later plans use them.
/// `Reducer::rebuild_buckets` measures them.
template <class P>
concept TimedBucketPolicy =
    BucketPolicy<P> && requires(P& policy, std::span<const double> times) { policy.set_ready_seconds(times); };

}  // namespace gradsync::inline v0_2
