// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../core/backend.hpp"
#include "../core/bucket_plan.hpp"
#include "../core/error.hpp"
#include "../core/parameter.hpp"
#include "../engine/bucket_layout.hpp"

namespace gradsync::inline v0_2::detail {

/// The dtype of the values of bucket b. Throws Error(invalid_argument) if they differ, because a bucket is gathered as one buffer, or if a
/// type is not floating.
inline DType value_dtype(const BucketPlan& plan, std::size_t b, std::span<const ParameterView> parameters, const char* who, int rank) {
    const ParameterView& first = parameters[plan.bucket(b).front()];
    for (std::size_t i : plan.bucket(b)) {
        const ParameterView& p = parameters[i];
        const auto refuse = [&](const std::string& what) {
            throw Error(Errc::invalid_argument, who + (" on rank " + std::to_string(rank)) + ": parameter '" + p.name + "' " + what,
                        {.operation = who, .rank = rank, .parameter = p.name});
        };
        if (!is_floating(p.value.dtype) || !is_floating(p.gradient.dtype))
            refuse("is not of a floating type; freeze it (requires_grad = false)");
        if (p.value.dtype != first.value.dtype)
            refuse("has values of " + std::string(name_of(p.value.dtype)) + ", but shares bucket " + std::to_string(b) + " with '" +
                   first.name + "' of " + std::string(name_of(first.value.dtype)) + "; put them in different buckets");
    }
    return first.value.dtype;
}

/// The parameters' values, laid out as the buckets of their gradients, so that the ranks can gather them by bucket.
template <Backend B>
class ValueBuckets {
public:
    ValueBuckets() = default;

    /// Collective.
    ValueBuckets(B& backend, const BucketPlan& plan, const BucketLayout& layout, std::span<const ParameterView> parameters, const char* who)
        : buckets_(plan.size()), values_(parameters.size()) {
        for (std::size_t b = 0; b < plan.size(); ++b) {
            buckets_[b] = {nullptr, layout.counts[b], value_dtype(plan, b, parameters, who, backend.rank()), B::memory_space};
            bytes_ += in_lines(buckets_[b].bytes());
        }
        memory_ = backend.allocate(bytes_);
        auto* next = static_cast<std::byte*>(memory_.data());
        for (std::size_t b = 0; b < plan.size(); ++b) {
            buckets_[b].data = next;
            for (std::size_t i : plan.bucket(b)) values_[i] = buckets_[b].subview(layout.offsets[i], parameters[i].gradient.count);
            next += in_lines(buckets_[b].bytes());
        }
    }

    BufferView bucket(std::size_t b) const noexcept { return buckets_[b]; }
    BufferView value(std::size_t i) const noexcept { return values_[i]; }  ///< parameter i must be trainable
    std::size_t bytes() const noexcept { return bytes_; }

private:
    decltype(std::declval<B&>().allocate(std::size_t{})) memory_{};
    std::size_t bytes_ = 0;
    std::vector<BufferView> buckets_;
    std::vector<BufferView> values_;
};

}  // namespace gradsync::inline v0_2::detail
