// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "bucket_storage.hpp"
#include "dealt_sums.hpp"
#include "micro_batch_sums.hpp"
#include "options.hpp"

namespace gradsync::inline v0_2::detail {

/// Allocates memory for the views, one after the other in lines of 64 bytes; returns its bytes. Collective.
template <Backend B, class Memory>
std::size_t allocate_lines(B& backend, List<BufferView>& views, Memory& memory) {
    std::size_t bytes = 0, first = 0;
    for (const BufferView& view : views) bytes += in_lines(view.bytes());
    memory = backend.allocate(bytes);
    for (BufferView& view : views) {
        view = typed_view(static_cast<std::byte*>(memory.data()) + first, view.count, view.dtype, B::memory_space);
        first += in_lines(view.bytes());
    }
    return bytes;
}

/// This rank's shards of the buckets, if gradients are sharded: the sums over a step's micro-batches, to which each reduction adds.
template <Backend B>
class GradientShards {
public:
    GradientShards(B& backend, const ReducerOptions& options)
        : passes_(passes_of(backend)),
          factor_(options.averaging == Averaging::mean ? 1.0 / static_cast<double>(options.micro_batches) : 1),
          sums_(backend, 0) {}

    /// For the buckets of `storage`, which are reduced as `sums` says. There is no sum yet. Collective.
    void allocate(B& backend, const BucketStorage<B>& storage, std::size_t buckets, const DealtSums& sums) {
        const DealtSums::Needs needs = sums.needs();
        micro_batches_ = sums.deal().micro_batches;
        buckets_ = buckets;
        first_part_ = needs.places * buckets;
        views_.resize(first_part_ + needs.parts * buckets);
        for (std::size_t k = 0; k < views_.size(); ++k) {  // as large as those of rank 0: every rank allocates the same number of bytes
            const BufferView bucket = storage.bucket(k % buckets);
            const DType dtype = k < first_part_ ? accumulator_of(bucket.dtype) : bucket.dtype;
            views_[k] = typed_view(nullptr, shard_range(bucket.count, backend.size(), 0).size(), dtype);
        }
        bytes_ = allocate_lines(backend, views_, memory_);
        sums_.reset(buckets);
        if (first_part_ > buckets)
            sums_.set_stride(
                static_cast<std::size_t>(static_cast<std::byte*>(views_[buckets].data) - static_cast<std::byte*>(views_[0].data)));
        for (std::size_t k = 0; k < views_.size(); ++k)
            views_[k].count = shard_range(storage.bucket(k % buckets).count, backend.size(), backend.rank()).size();
    }
    std::size_t bytes() const noexcept { return bytes_; }

    BufferView operator[](std::size_t b) const noexcept { return views_[b]; }
    /// The memory for this rank's shard of sum k of bucket b, if a round has several.
    BufferView part(std::size_t k, std::size_t b) const noexcept { return views_[first_part_ + k * buckets_ + b]; }

    /// Adds the next sum, over `leaves` micro-batches, to the shard of bucket b. The last one of a step completes it.
    void add(std::size_t b, BufferView sum, std::size_t leaves) {
        if (micro_batches_ == 0) return sums_.push_in_a_row(b, sum, views_[b]);
        if (sums_.leaves(b) + leaves != micro_batches_) return sums_.push(b, sum, views_[b], leaves);
        sums_.fold(b, sum, views_[b], views_[b]);
        if (factor_ != 1) passes_.scale(views_[b], factor_);
    }
    void forget() noexcept { sums_.forget(); }

private:
    [[no_unique_address]] PassesOf<B> passes_;
    const double factor_;
    decltype(std::declval<B&>().allocate(std::size_t{})) memory_{};
    List<BufferView> views_;  ///< by place and bucket, then by part and bucket
    std::size_t micro_batches_ = 0, buckets_ = 0, first_part_ = 0, bytes_ = 0;
    SumStacks<B> sums_;  ///< by bucket
};

}  // namespace gradsync::inline v0_2::detail
