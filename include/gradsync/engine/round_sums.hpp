// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "bucket_memory.hpp"
#include "dealt_sums.hpp"
#include "options.hpp"
#include "policies.hpp"

namespace gradsync::inline v0_2::detail {

/// The sums over ranks that a step is made of: which there are (`dealt()`), the memory in which each is reduced, and
/// their addition. Most steps have one sum for each bucket, and its memory is the bucket. Sums of pooled gradients are
/// added to this rank's shards, which stay during a step.
///
/// If a bucket has several sums, this is the exchange that reduces them, each in memory of its own. Ranks outside a sum
/// contribute nothing to it and send nothing. Rarely used, so it is compiled for size.
template <Backend B>
class RoundSums final : public AnyExchange<B> {
public:
    /// The references outlive this. `own`: this rank's sums of its micro-batches.
    RoundSums(B& backend, const ReducerOptions& options, const Policies<B>& policies, const BucketMemory<B>& storage,
              const MicroBatchSums<B>& own)
        : AnyExchange<B>(policies.exchange->traits, true),
          options_(options),
          size_(backend.size()),
          rank_(backend.rank()),
          storage_(storage),
          own_(own),
          dealt_(deal_of(options, size_),
                 policies.sums && B::memory_space == MemorySpace::host && has_several_sums(options, size_)),
          passes_(passes_of(backend)),
          sums_(backend, 0) {
        if (!pooled() && dealt_.several()) additions_ = dealt_.needs().additions;
    }

    /// Allocates the shards of pooled gradients, once their buckets are laid out. No sum exists yet. Collective.
    [[gnu::cold]] void allocate(B& backend) {
        if (!pooled()) return;
        const DealtSums::Needs needs = dealt_.needs();
        List<BufferView> shards, parts;
        for (const BufferView& bucket : storage_.buckets()) {
            // Rank 0's size, because every rank must allocate the same number of bytes.
            const std::size_t largest = shard_range(bucket.count, size_, 0).size();
            shards.push_back(typed_view(nullptr, largest, accumulator_of(bucket.dtype), B::memory_space));
            parts.push_back(typed_view(nullptr, largest, bucket.dtype, B::memory_space));
        }
        sums_.reset(shards.size());
        shards_ = Arrays<B>("shards of gradients", backend, std::move(shards), needs.places);
        parts_ = Arrays<B>("sums of gradients", backend, std::move(parts), needs.at_a_time > 1 ? needs.at_a_time : 0);
        sums_.set_stride(shards_.image_bytes());
    }
    std::size_t bytes() const noexcept { return shards_.bytes() + parts_.bytes(); }

    const Deal& deal() const noexcept { return dealt_.deal(); }
    const DealtSums& dealt() const noexcept { return dealt_; }
    /// Ends a round of micro-batches, one per rank. With `ends_step` the step is over, and its shards are no longer
    /// needed.
    void end_round(bool ends_step) {
        if (ends_step) sums_.forget();
        dealt_.set_round(ends_step ? 0 : dealt_.round() + 1);
    }

    /// The number of copies of each bucket's memory; more than one if sums of micro-batches have the slot's type.
    std::size_t images() const noexcept {
        return spares() + (own_.apart() ? 1 : larger<std::size_t>(1, own_.places() + (own_.in_place() ? 1 : 0)));
    }
    /// This rank's shard of bucket b, once its collectives are complete.
    BufferView shard(std::size_t b) const noexcept {
        return pooled() ? own_part(b, shards_[b]) : shard_of(storage_.buckets()[b], size_, rank_);
    }
    /// Call when bucket b is reduced. Adds up its sums, if there are several, or adds them to the shard.
    void add_up(std::size_t b) {
        if (pooled()) add_to_shard(b);
        else if (!additions_.empty()) add_up_all(b);
    }

    // ------------------------------------------------------------------------------------------ see AnyExchange

    [[gnu::cold]] Traffic traffic(const B&, std::size_t, BufferView bucket) const override {
        Traffic all{0, dealt_.now().size()};
        for (const DealtSum& sum : dealt_.now()) all.bytes += sum.has(rank_) ? bucket.bytes() : 0;
        return all;
    }
    [[gnu::cold]] void adopt_plan(B&, const BucketLayout&, const BucketPlan& plan, ListView<const ParameterInfo>,
                                  ListView<const ParameterView>) override {
        each_ = dealt_.needs().at_a_time;
        works_ = List<typename B::WorkType>(plan.size() * each_);
    }
    [[gnu::cold]] void start(B& backend, std::size_t b, BufferView, ReduceOp op, Contribution own) override {
        for (std::size_t k = 0; k < dealt_.now().size(); ++k) {
            const Contribution part{dealt_.now()[k].has(rank_) ? own.scale : 0, own.weight};
            works_[b * each_ + k] = this->traits.scatters ? backend.reduce_scatter(memory(b, k), result(b, k), op, part)
                                                          : backend.all_reduce(memory(b, k), op, part);
        }
    }
    // If a round uses fewer works than exist, the others are complete from an earlier round, or empty.
    [[gnu::cold]] bool poll(std::size_t b) override {
        for (std::size_t k = 0; k < each_; ++k)
            if (!poll_work(works_[b * each_ + k])) return false;
        return true;
    }
    [[gnu::cold]] bool test(std::size_t b) override {
        for (std::size_t k = 0; k < each_; ++k)
            if (!works_[b * each_ + k].test()) return false;
        return true;
    }
    [[gnu::cold]] void wait(B& backend, std::size_t b) override {
        for (std::size_t k = 0; k < each_; ++k) await(backend, works_[b * each_ + k]);
    }

private:
    /// The memory of bucket b in which sum k of the current ones is reduced. It holds this rank's contribution, if it
    /// has one.
    BufferView memory(std::size_t b, std::size_t k) const noexcept {
        const BufferView bucket = storage_.buckets()[b];
        if (pooled()) return bucket;
        const ListView<const DealtSum> now = dealt_.now();
        if (!has_spare(k)) return own_.root(now[k].round, storage_.image(bucket, own_.in_place() ? 1 : 0), bucket);
        std::size_t before = 0;
        for (std::size_t i = 0; i < k; ++i) before += std::size_t{has_spare(i)};
        return storage_.image(bucket, images() - spares() + before);
    }
    /// The memory of the result of sum k: the whole bucket, or this rank's shard.
    BufferView result(std::size_t b, std::size_t k) const noexcept {
        if (pooled() && dealt_.now().size() > 1) return own_part(b, parts_.image(b, k));
        return this->traits.scatters ? shard_of(memory(b, k), size_, rank_) : memory(b, k);
    }
    bool pooled() const noexcept { return options_.gradients == GradientStorage::pooled; }
    BufferView own_part(std::size_t b, BufferView largest) const noexcept {
        return largest.subview(0, shard_range(storage_.buckets()[b].count, size_, rank_).size());
    }
    std::size_t spares() const noexcept { return own_.leaves_roots() ? dealt_.now().size() - deal().rounds() : 0; }
    /// Sums of other ranks use spare memory, except the first of a round without a sum of this rank.
    bool has_spare(std::size_t k) const noexcept {
        const ListView<const DealtSum> now = dealt_.now();
        const bool is_first = k == 0 || now[k - 1].round != now[k].round;
        return !now[k].has(rank_) && (!is_first || now[k].round < own_.roots());
    }
    /// The factor of a step's sum, if micro-batches are counted.
    double factor() const noexcept {
        return options_.averaging == Averaging::mean ? 1.0 / static_cast<double>(options_.micro_batches) : 1;
    }
    [[gnu::cold, gnu::noinline]] void add_up_all(std::size_t b) {
        inputs_.resize(additions_.size());
        for (std::size_t k = 0; k < inputs_.size(); ++k) inputs_[k] = result(b, k).data;
        const BufferView bucket = storage_.buckets()[b],
                         to = this->traits.scatters ? shard_of(bucket, size_, rank_) : bucket;
        kernel::reduce({inputs_, {}, {&to.data, 1}, to.count, to.dtype, ReduceOp::sum, factor(), additions_});
    }
    /// The last sum of a step completes the shard.
    void add_to_shard(std::size_t b) {
        const BufferView shard = this->shard(b);
        if (options_.micro_batches == 0)
            return sums_.push_in_a_row(b, shard_of(storage_.buckets()[b], size_, rank_), shard);
        for (std::size_t k = 0; k < dealt_.now().size(); ++k) {
            const BufferView sum = result(b, k);
            const std::size_t leaves = dealt_.now()[k].leaves;
            if (sums_.leaves(b) + leaves != dealt_.leaves()) {
                sums_.push(b, sum, shard, leaves);
                continue;
            }
            sums_.fold(b, sum, shard, shard);
            const double total = factor() * larger(sum_divisor(options_, sum.dtype, size_), 1.0);
            if (total != 1) passes_.scale(shard, total);
        }
    }

    const ReducerOptions& options_;
    const int size_, rank_;
    const BucketMemory<B>& storage_;
    const MicroBatchSums<B>& own_;
    DealtSums dealt_;
    List<std::uint8_t> additions_;  ///< by sum, if there are several: see kernel::Reduction::sums
    List<const void*> inputs_;
    [[no_unique_address]] PassesOf<B> passes_;
    Arrays<B> shards_, parts_;  ///< of pooled gradients, by place or sum, and bucket
    SumStacks<B> sums_;         ///< of pooled gradients, by bucket
    std::size_t each_ = 0;
    List<typename B::WorkType> works_;  ///< by bucket, and sum of a round
};

}  // namespace gradsync::inline v0_2::detail
