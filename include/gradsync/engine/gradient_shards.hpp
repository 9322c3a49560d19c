// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/shard_range.hpp"
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

/// This rank's shards of the buckets, where they do not stay in the buckets: the sums over a step's micro-batches, to which each reduction
/// of a bucket adds.
template <Backend B>
class GradientShards {
public:
    /// `sums`: see Policies.
    GradientShards(B& backend, const ReducerOptions& options, std::size_t buckets, bool sums)
        : passes_(passes_of(backend)),
          deal_(deal_of(options, backend.size())),
          has_several_(sums && has_several_sums(options, backend.size())),
          divides_(options.averaging == Averaging::mean),
          sums_(backend, buckets) {}

    /// For an empty sum, and buckets of these sizes and types. Collective.
    template <class BucketAt>
    void allocate(B& backend, std::size_t buckets, BucketAt&& bucket) {
        if (!deal_.sharded_gradients && !has_several_) return;
        std::size_t places = 1, leaves = 0, parts = 0, most_parts = 0;
        for (std::size_t round = 0; round < deal_.rounds(); ++round) {
            for_each_sum_of(round, [&](int first, int last, std::size_t block) {
                leaves += static_cast<std::size_t>(last - first) * block;
                if (leaves != deal_.micro_batches) places = larger(places, static_cast<std::size_t>(std::popcount(leaves)));
                parts += has_several_ ? 1 : 0;
            });
            most_parts = larger(most_parts, parts);
            if (deal_.sharded_gradients) parts = 0;
        }
        const auto shard_at = [&](std::size_t k, int rank) { return shard_range(bucket(k % buckets).count, backend.size(), rank).size(); };
        views_.resize((places + most_parts) * buckets);
        for (std::size_t k = 0; k < views_.size(); ++k) {  // as large as those of rank 0: every rank allocates the same number of bytes
            const DType own = bucket(k % buckets).dtype;
            views_[k] = typed_view(nullptr, shard_at(k, 0), k < places * buckets ? accumulator_of(own) : own);
        }
        bytes_ = allocate_lines(backend, views_, memory_);
        if (places > 1 && buckets != 0)
            sums_.set_stride(
                static_cast<std::size_t>(static_cast<std::byte*>(views_[buckets].data) - static_cast<std::byte*>(views_[0].data)));
        for (std::size_t k = 0; k < views_.size(); ++k) views_[k].count = shard_at(k, backend.rank());
        first_part_ = places * buckets;
        buckets_ = buckets;
    }
    std::size_t bytes() const noexcept { return bytes_; }

    const Deal& deal() const noexcept { return deal_; }
    /// Do the ranks' gradients of a bucket add up to several sums, which are reduced one by one?
    bool has_several() const noexcept { return has_several_; }
    /// Calls `use(round, first, last, block)` for each sum that is reduced now: that of the blocks of ranks [first, last) in a round of the
    /// deal.
    template <class Use>
    void for_each_sum(Use&& use) const {
        const std::size_t end = deal_.sharded_gradients ? round_ + 1 : deal_.rounds();
        for (std::size_t round = deal_.sharded_gradients ? round_ : 0; round < end; ++round)
            for_each_sum_of(round, [&](int first, int last, std::size_t block) { use(round, first, last, block); });
    }

    BufferView operator[](std::size_t b) const noexcept { return views_[b]; }
    /// The memory that sum k of bucket b is reduced to.
    BufferView part(std::size_t k, std::size_t b) const noexcept { return views_[first_part_ + k * buckets_ + b]; }

    /// Bucket b is reduced, to `own` if it has one sum.
    void land(std::size_t b, BufferView own) {
        if (deal_.micro_batches == 0) return sums_.push_in_a_row(b, own, views_[b]);
        std::size_t k = 0;
        for_each_sum([&](std::size_t, int first, int last, std::size_t block) {
            const BufferView sum = has_several_ ? part(k++, b) : own;
            const std::size_t leaves = static_cast<std::size_t>(last - first) * block;
            if (sums_.leaves(b) + leaves != deal_.micro_batches) return sums_.push(b, sum, views_[b], leaves);
            sums_.fold(b, sum, views_[b], views_[b]);
            if (divides_) passes_.scale(views_[b], 1.0 / static_cast<double>(deal_.micro_batches));
        });
    }
    /// Each rank's micro-batch is over; more of the step follow.
    void end_round() noexcept { ++round_; }
    std::size_t round() const noexcept { return round_; }
    /// Ends the step.
    void forget() noexcept {
        sums_.forget();
        round_ = 0;
    }

private:
    template <class Use>
    void for_each_sum_of(std::size_t number, Use&& use) const {
        const Deal::Round round = deal_.round(number);
        for (int first = 0, last = 0; first < round.ranks; first = last) {
            last = has_several_ ? end_of_sum(round, first) : round.ranks;
            use(first, last, round.block);
        }
    }

    [[no_unique_address]] PassesOf<B> passes_;
    const Deal deal_;
    const bool has_several_, divides_;
    decltype(std::declval<B&>().allocate(std::size_t{})) memory_{};
    List<BufferView> views_;  ///< by place and bucket, then by part and bucket
    std::size_t buckets_ = 0, first_part_ = 0, bytes_ = 0, round_ = 0;
    SumStacks<B> sums_;  ///< by bucket
};

}  // namespace gradsync::inline v0_2::detail
