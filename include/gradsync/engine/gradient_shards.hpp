// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/shard_range.hpp"
#include "../kernel/reduce.hpp"
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

/// This rank's shards of the buckets, where a bucket's reduction does not end with them. Sharded gradients: the sums over a step's
/// micro-batches, to which each reduction adds. Whole gradients of which the ranks reduce several sums: their total.
template <Backend B>
class GradientShards {
public:
    /// `sums`: see Policies.
    GradientShards(B& backend, const ReducerOptions& options, std::size_t buckets, bool sums)
        : passes_(passes_of(backend)),
          dealt_(deal_of(options, backend.size()),
                 sums && B::memory_space == MemorySpace::host && has_several_sums(options, backend.size())),
          factor_(options.averaging == Averaging::mean ? 1.0 / static_cast<double>(options.micro_batches) : 1),
          sums_(backend, buckets) {}

    /// For the buckets of `storage`. There is no sum yet. Collective.
    void allocate(B& backend, const BucketStorage<B>& storage) {
        if (!deal().sharded_gradients && !several()) return;
        DealtSums::Needs needs = dealt_.needs();
        additions_ = std::move(needs.additions);
        most_at_a_time_ = needs.at_a_time;
        inputs_.reserve(additions_.size());
        const std::size_t places = deal().sharded_gradients ? needs.places : 0;  // otherwise all parts are there before they are added up
        buckets_ = sums_.size();
        first_part_ = places * buckets_;
        views_.resize((places + needs.parts) * buckets_);
        for (std::size_t k = 0; k < views_.size(); ++k) {  // as large as those of rank 0: every rank allocates the same number of bytes
            const BufferView bucket = storage.bucket(k % buckets_);
            const DType dtype = k < first_part_ ? accumulator_of(bucket.dtype) : bucket.dtype;
            views_[k] = typed_view(nullptr, shard_range(bucket.count, backend.size(), 0).size(), dtype);
        }
        bytes_ = allocate_lines(backend, views_, memory_);
        if (places > 1 && buckets_ != 0)
            sums_.set_stride(
                static_cast<std::size_t>(static_cast<std::byte*>(views_[buckets_].data) - static_cast<std::byte*>(views_[0].data)));
        for (std::size_t k = 0; k < views_.size(); ++k)
            views_[k].count = shard_range(storage.bucket(k % buckets_).count, backend.size(), backend.rank()).size();
    }
    std::size_t bytes() const noexcept { return bytes_; }

    const Deal& deal() const noexcept { return dealt_.deal(); }
    /// Do the ranks' gradients of a bucket add up to several sums, which are reduced one by one?
    bool several() const noexcept { return dealt_.several(); }
    /// The sums that are reduced now.
    ListView<const DealtSum> now() const noexcept { return dealt_.now(); }
    std::size_t most_at_a_time() const noexcept { return most_at_a_time_; }

    BufferView operator[](std::size_t b) const noexcept { return views_[b]; }
    /// The memory that sum k of bucket b, of those that not all ranks have a part in, is reduced to.
    BufferView part(std::size_t k, std::size_t b) const noexcept { return views_[first_part_ + k * buckets_ + b]; }

    /// Adds a sum to that of bucket b if the micro-batches of a step are not counted.
    void add_in_a_row(std::size_t b, BufferView sum) { sums_.push_in_a_row(b, sum, views_[b]); }
    /// Adds the next sum of bucket b, over `leaves` micro-batches. The last one completes the shard: for whole gradients, `own` gets it.
    void add(std::size_t b, BufferView sum, std::size_t leaves, BufferView own) {
        if (!deal().sharded_gradients) {
            inputs_.push_back(sum.data);
            if (inputs_.size() != additions_.size()) return;
            kernel::reduce({inputs_, {}, {&own.data, 1}, own.count, own.dtype, ReduceOp::sum, factor_, additions_});
            return inputs_.clear();
        }
        if (sums_.leaves(b) + leaves != deal().micro_batches) return sums_.push(b, sum, views_[b], leaves);
        sums_.fold(b, sum, views_[b], views_[b]);
        if (factor_ != 1) passes_.scale(views_[b], factor_);
    }
    /// Each rank's micro-batch is over; more of the step follow.
    void end_round() { dealt_.set_round(round() + 1); }
    std::size_t round() const noexcept { return dealt_.round(); }
    /// Ends the step.
    void forget() {
        sums_.forget();
        dealt_.set_round(0);
    }

private:
    [[no_unique_address]] PassesOf<B> passes_;
    DealtSums dealt_;
    const double factor_;
    decltype(std::declval<B&>().allocate(std::size_t{})) memory_{};
    List<BufferView> views_;        ///< by place and bucket, then by part and bucket
    List<std::uint8_t> additions_;  ///< by part: see kernel::Reduction::sums
    List<const void*> inputs_;
    std::size_t buckets_ = 0, first_part_ = 0, bytes_ = 0, most_at_a_time_ = 0;
    SumStacks<B> sums_;  ///< by bucket
};

}  // namespace gradsync::inline v0_2::detail
