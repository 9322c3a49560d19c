// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/shard_range.hpp"
#include "../kernel/reduce.hpp"
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
          deal_(deal_of(options, backend.size())),
          has_several_(sums && B::memory_space == MemorySpace::host && has_several_sums(options, backend.size())),
          divides_(options.averaging == Averaging::mean),
          sums_(backend, buckets) {}

    /// For an empty sum, and buckets of these sizes and types. Collective.
    template <class BucketAt>
    void allocate(B& backend, std::size_t buckets, BucketAt&& bucket) {
        if (!deal_.sharded_gradients && !has_several_) return;
        const bool adds = deal_.sharded_gradients;  // otherwise all parts are there before they are added up
        std::size_t places = adds ? 1 : 0, leaves = 0, parts = 0, most_parts = 0;
        std::size_t open[65], top = 0;  // the first micro-batches of the sums on the stack
        additions_.clear();
        for (std::size_t round = 0; round < deal_.rounds(); ++round) {
            if (adds) parts = 0;
            for_each_sum_of(round, [&](int first, int last, std::size_t count) {
                open[top++] = leaves;
                leaves += count;
                additions_.push_back(0);
                for (; top > 1 && are_halves(open[top - 2], open[top - 1], leaves, deal_.micro_batches); --top) ++additions_.back();
                if (adds && leaves != deal_.micro_batches) places = larger(places, top);
                parts += last - first == backend.size() ? 0 : 1;
            });
            most_parts = larger(most_parts, parts);
        }
        inputs_.reserve(additions_.size());
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
    /// Calls `use(round, first, last, leaves)` for each sum that is reduced now: that of the blocks of ranks [first, last) in a round of the
    /// deal.
    template <class Use>
    void for_each_sum(Use&& use) const {
        const std::size_t end = deal_.sharded_gradients ? round_ + 1 : deal_.rounds();
        for (std::size_t round = deal_.sharded_gradients ? round_ : 0; round < end; ++round)
            for_each_sum_of(round, [&](int first, int last, std::size_t leaves) { use(round, first, last, leaves); });
    }

    BufferView operator[](std::size_t b) const noexcept { return views_[b]; }
    /// The memory that sum k of bucket b, of those that not all ranks have a part in, is reduced to.
    BufferView part(std::size_t k, std::size_t b) const noexcept { return views_[first_part_ + k * buckets_ + b]; }

    /// Adds a sum to that of bucket b if the micro-batches of a step are not counted.
    void add_in_a_row(std::size_t b, BufferView sum) { sums_.push_in_a_row(b, sum, views_[b]); }
    /// Adds the next sum of bucket b, over `leaves` micro-batches. The last one completes the shard: for whole gradients, `own` gets it.
    void add(std::size_t b, BufferView sum, std::size_t leaves, BufferView own) {
        const double factor = divides_ ? 1.0 / static_cast<double>(deal_.micro_batches) : 1;
        if (!deal_.sharded_gradients) {
            inputs_.push_back(sum.data);
            if (inputs_.size() != additions_.size()) return;
            kernel::reduce({inputs_, {}, {&own.data, 1}, own.count, own.dtype, ReduceOp::sum, factor, additions_});
            return inputs_.clear();
        }
        if (sums_.leaves(b) + leaves != deal_.micro_batches) return sums_.push(b, sum, views_[b], leaves);
        sums_.fold(b, sum, views_[b], views_[b]);
        if (factor != 1) passes_.scale(views_[b], factor);
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
            use(first, last, static_cast<std::size_t>(last - first) * round.block);
        }
    }

    [[no_unique_address]] PassesOf<B> passes_;
    const Deal deal_;
    const bool has_several_, divides_;
    decltype(std::declval<B&>().allocate(std::size_t{})) memory_{};
    List<BufferView> views_;        ///< by place and bucket, then by part and bucket
    List<std::uint8_t> additions_;  ///< by part: see kernel::Reduction::sums
    List<const void*> inputs_;
    std::size_t buckets_ = 0, first_part_ = 0, bytes_ = 0, round_ = 0;
    SumStacks<B> sums_;  ///< by bucket
};

}  // namespace gradsync::inline v0_2::detail
