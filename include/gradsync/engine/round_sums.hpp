// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../kernel/reduce.hpp"
#include "bucket_memory.hpp"

namespace gradsync::inline v0_2::detail {

/// The sums over ranks that a step is made of: which there are (`dealt()`), the memory in which each is reduced, and
/// their addition. Most steps have one sum for each bucket, and its memory is the bucket.
template <Backend B>
class RoundSums {
public:
    /// The references outlive this. `own`: this rank's sums of its micro-batches. `shards`: what is reduced of pooled
    /// gradients. `several`: may a round be split into sums? `halves`: does the exchange end with this rank's shards?
    RoundSums(const B& backend, const ReducerOptions& options, bool several, bool halves,
              const BucketMemory<B>& storage, const MicroBatchSums<B>& own, const GradientShards<B>& shards)
        : options_(options),
          halves_(halves),
          size_(backend.size()),
          rank_(backend.rank()),
          storage_(storage),
          own_(own),
          shards_(shards),
          dealt_(deal_of(options, size_), several && has_several_sums(options, size_)) {
        if (!pooled() && dealt_.several()) additions_ = dealt_.needs().additions;
    }

    const Deal& deal() const noexcept { return dealt_.deal(); }
    const DealtSums& dealt() const noexcept { return dealt_; }
    void set_round(std::size_t round) { dealt_.set_round(round); }

    /// The number of copies of each bucket's memory; more than one if sums of micro-batches have the slot's type.
    std::size_t images() const noexcept {
        return spares() + (own_.apart() ? 1 : larger<std::size_t>(1, own_.places() + (own_.in_place() ? 1 : 0)));
    }
    /// The memory of bucket b in which sum k of the current ones is reduced. It holds this rank's contribution, if it
    /// has one.
    BufferView memory(std::size_t b, std::size_t k) const noexcept {
        const BufferView bucket = storage_.buckets()[b];
        if (pooled()) return bucket;
        const ListView<const DealtSum> now = dealt_.now();
        if (!has_spare(k)) return own_.root(now[k].round, image_of(storage_, bucket, own_.in_place() ? 1 : 0), bucket);
        std::size_t before = 0;
        for (std::size_t i = 0; i < k; ++i) before += std::size_t{has_spare(i)};
        return image_of(storage_, bucket, images() - spares() + before);
    }
    /// The memory of the result of sum k: the whole bucket, or this rank's shard.
    BufferView result(std::size_t b, std::size_t k) const noexcept {
        if (pooled() && dealt_.now().size() > 1) return shards_.part(k, b);
        return halves_ ? shard_of(memory(b, k), size_, rank_) : memory(b, k);
    }
    /// Adds up the sums of bucket b, if there are several and none is added to the shards.
    void add_up(std::size_t b) {
        if (!additions_.empty()) add_up_all(b);
    }

private:
    bool pooled() const noexcept { return options_.gradients == GradientStorage::pooled; }
    std::size_t spares() const noexcept { return own_.leaves_roots() ? dealt_.now().size() - deal().rounds() : 0; }
    /// Sums of other ranks use spare memory, except the first of a round without a sum of this rank.
    bool has_spare(std::size_t k) const noexcept {
        const ListView<const DealtSum> now = dealt_.now();
        const bool is_first = k == 0 || now[k - 1].round != now[k].round;
        return !now[k].has(rank_) && (!is_first || now[k].round < own_.roots());
    }
    [[gnu::cold, gnu::noinline]] void add_up_all(std::size_t b) {
        inputs_.resize(additions_.size());
        for (std::size_t k = 0; k < inputs_.size(); ++k) inputs_[k] = result(b, k).data;
        const BufferView bucket = storage_.buckets()[b], to = halves_ ? shard_of(bucket, size_, rank_) : bucket;
        const bool averages = options_.averaging == Averaging::mean;
        const double factor = averages ? 1.0 / static_cast<double>(options_.micro_batches) : 1;
        kernel::reduce({inputs_, {}, {&to.data, 1}, to.count, to.dtype, ReduceOp::sum, factor, additions_});
    }

    const ReducerOptions& options_;
    const bool halves_;
    const int size_, rank_;
    const BucketMemory<B>& storage_;
    const MicroBatchSums<B>& own_;
    const GradientShards<B>& shards_;
    DealtSums dealt_;
    List<std::uint8_t> additions_;  ///< by sum, if there are several: see kernel::Reduction::sums
    List<const void*> inputs_;
};

}  // namespace gradsync::inline v0_2::detail
