#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "../core/backend.hpp"
#include "../core/bucket_plan.hpp"
#include "../core/parameter.hpp"

namespace gradsync::inline v0::detail {

/// The buckets' memory: each one contiguous, all in one allocation, parameters at offsets that are multiples of
/// 64 bytes (the gaps stay zero). Zeroed at first.
template <Backend B>
class BucketStorage {
public:
    BucketStorage() = default;

    /// `is_direct(b)`: the bucket is the gradient of its only parameter, in the trainer's memory. Collective, as the
    /// backend's `allocate` is.
    template <class IsDirect>
    BucketStorage(B& backend, const BucketPlan& plan, std::span<const ParameterInfo> infos, std::span<const ParameterView> parameters,
                  IsDirect is_direct)
        : buckets_(plan.size()), parameters_(infos.size()) {
        std::size_t total = 0;
        std::vector<std::size_t> offsets(infos.size());
        std::vector<std::size_t> starts(plan.size());
        const auto round_up = [](std::size_t bytes) { return (bytes + 63) / 64 * 64; };
        for (std::size_t b = 0; b < plan.size(); ++b) {
            if (is_direct(b)) continue;
            starts[b] = total;
            for (std::size_t i : plan.bucket(b)) {
                offsets[i] = total;
                total += round_up(infos[i].bytes());
            }
        }
        memory_ = backend.allocate(total);
        auto* base = static_cast<std::byte*>(memory_.data());
        for (std::size_t b = 0; b < plan.size(); ++b) {
            const ParameterInfo& first = infos[plan.bucket(b).front()];
            if (is_direct(b)) {
                buckets_[b] = parameters_[plan.bucket(b).front()] = parameters[plan.bucket(b).front()].gradient;
                continue;
            }
            std::size_t end = starts[b];
            for (std::size_t i : plan.bucket(b)) {
                parameters_[i] = {base + offsets[i], infos[i].count, infos[i].dtype, B::memory_space};
                end = offsets[i] + infos[i].bytes();
            }
            buckets_[b] = {base + starts[b], (end - starts[b]) / size_of(first.dtype), first.dtype, B::memory_space};
        }
    }

    /// What travels. A bucket ends with its last parameter.
    BufferView bucket(std::size_t b) const noexcept { return buckets_[b]; }
    /// Where parameter i lies in its bucket.
    BufferView parameter(std::size_t i) const noexcept { return parameters_[i]; }

    void rebind(std::size_t b, std::size_t i, BufferView gradient) noexcept { buckets_[b] = parameters_[i] = gradient; }

private:
    using Memory = decltype(std::declval<B&>().allocate(std::size_t{}));

    Memory memory_{};
    std::vector<BufferView> buckets_;
    std::vector<BufferView> parameters_;
};

}  // namespace gradsync::inline v0::detail
