// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstring>

#include "../core/backend.hpp"
#include "../core/bucket_plan.hpp"
#include "../core/list.hpp"
#include "../core/math.hpp"
#include "../core/parameter.hpp"
#include "../core/shard_range.hpp"
#include "../kernel/isa.hpp"
#include "../kernel/passes.hpp"
#include "bucket_storage.hpp"
#include "micro_batch_sums.hpp"
#include "options.hpp"
#include "parameters.hpp"
#include "policies.hpp"
#include "verification.hpp"

namespace gradsync::inline v0_2::detail {

/// The gradients, and how they get into and out of the buckets. The engine decides when. `add_up` and `deposit` may run for different
/// gradients at once.
template <Backend B>
class GradientBuckets {
public:
    /// Plans the buckets without allocating them. `policy` outlives this. `scattered`: see `bucket_infos`. `packed`: see Policies. Throws
    /// Error if parameters, options and policy do not fit together.
    [[gnu::cold]] GradientBuckets(B& backend, List<ParameterView> parameters, const ReducerOptions& options, const AnyBuckets& policy,
                                  bool scattered, bool packed)
        : options_(options),
          scattered_(scattered),
          size_(backend.size()),
          rank_(backend.rank()),
          policy_(policy),
          parameters_(std::move(parameters)),
          infos_(infos_for(backend, packed)),
          order_(default_order(parameters_)),
          plan_(make_plan(backend)),
          sums_(backend, parameters_.size(), place_of_sums(), due(backend)),
          shard_sums_(backend, plan_.size(), pooled() ? Place::slot : Place::none, due(backend)),
          passes_(passes_of(backend)),
          asked_for_(parameters_.size()) {}

    /// Allocates the buckets. Call it first, when all ranks are known to have the same plan. Collective.
    [[gnu::cold]] void allocate(B& backend) {
        storage_ = make_storage(backend);
        allocate_shards(backend);
        List<BufferView> like(parameters_.size());
        for (std::size_t i : order_) like[i] = typed_view(nullptr, infos_[i].count, accumulator_of(infos_[i].dtype));
        sums_.allocate(backend, like);
        prepare_marks();
    }

    const List<ParameterView>& parameters() const noexcept { return parameters_; }
    const ParameterView& parameter(std::size_t i) const noexcept { return parameters_[i]; }
    /// The trainable parameters, in the order in which their gradients are expected to become ready.
    std::span<const std::size_t> order() const noexcept { return order_; }
    const BucketPlan& plan() const noexcept { return plan_; }

    const List<ParameterInfo>& infos() const noexcept { return infos_; }
    const BucketLayout& layout() const noexcept { return storage_.layout(); }
    std::size_t bytes() const noexcept { return storage_.bytes() + shard_bytes_ + sums_.bytes(); }  ///< of memory that the library owns

    /// The memory of bucket b, for collectives.
    BufferView bucket(std::size_t b) const noexcept { return storage_.bucket(b); }

    /// The memory in which the trainer finds gradient i.
    BufferView gradient(std::size_t i) const noexcept {
        return live_here() && parameters_[i].requires_grad ? storage_.parameter(i) : parameters_[i].gradient;
    }

    // -------------------------------------------------------------------- gradients that are reduced to shards

    /// This rank's shard of bucket b, once its collective is complete.
    BufferView shard(std::size_t b) const noexcept { return pooled() ? shards_[b] : own_part(b); }

    /// Do buckets have memory only while they need it? If so, `obtain` must precede writes to a gradient, and `land` must follow the
    /// collective of its bucket.
    bool pooled() const noexcept { return options_.gradients == GradientStorage::pooled; }
    /// Records that the trainer asked for gradient i, which has memory.
    void ask_for(std::size_t i) noexcept {
        std::lock_guard lock(slots_);
        asked_for_[i] = 1;
    }
    /// Did the trainer ask for gradient i in this backward?
    bool was_asked_for(std::size_t i) noexcept {
        std::lock_guard lock(slots_);
        return asked_for_[i] != 0;
    }
    /// Gives bucket b a slot; false if all are taken. With `more` it adds a slot then, if the backend reads any memory. For any thread.
    bool obtain(std::size_t b, bool more = false) {
        std::lock_guard lock(slots_);
        if (storage_.has_slot(b) || storage_.take_slot(b, plan_.bucket(b))) return true;
        if constexpr (B::memory_space == MemorySpace::host) {
            if (!more) return false;
            storage_.add_slot(b);
            return storage_.take_slot(b, plan_.bucket(b));
        }
        return false;
    }
    /// Stores this rank's shard of bucket b, or adds it to those of earlier micro-batches, and returns the slot.
    void land(std::size_t b) {
        if (!pooled()) return;
        if (shard_sums_.over() + 1 != shard_sums_.due()) {
            shard_sums_.add(b, own_part(b), shards_[b]);
        } else {
            if (shard_sums_.holds(b)) shard_sums_.add_last(b, own_part(b), shards_[b]);
            else passes_.copy(own_part(b), shards_[b]);
            if (options_.averaging == Averaging::mean) passes_.scale(shards_[b], 1.0 / static_cast<double>(options_.micro_batches));
        }
        std::lock_guard lock(slots_);
        for (std::size_t i : plan_.bucket(b)) asked_for_[i] = 0;
        if (storage_.bucket(b).data != nullptr) storage_.return_slot(b, plan_.bucket(b));
    }
    /// Sets whether `land` adds new shards to those that are there: those of a further micro-batch.
    void add_to_shards(bool adds) noexcept {
        if (adds) shard_sums_.end_micro_batch();
        else shard_sums_.forget();
    }
    bool adds_to_shards() const noexcept { return shard_sums_.over() != 0; }

    /// Does gradient i have to be copied into its bucket?
    bool is_copied(std::size_t i) const noexcept { return marks_[i].copied; }
    /// Does a mark of gradient i have to `deposit` it?
    bool is_deposited(std::size_t i) const noexcept { return marks_[i].copied || sums_.in_place(); }
    std::size_t bytes_of(std::size_t i) const noexcept { return marks_[i].gradient.bytes(); }
    /// The sums of earlier micro-batches of this step.
    MicroBatchSums<B>& sums() noexcept { return sums_; }
    const MicroBatchSums<B>& sums() const noexcept { return sums_; }
    /// Adds gradient i to the sums of its micro-batches. More are to come.
    void add_up(std::size_t i) { sums_.add(i, gradient(i), storage_.parameter(i)); }

    /// Puts gradient i, which is complete, into its bucket, together with the sums of earlier micro-batches.
    GRADSYNC_ALWAYS_INLINE void deposit(std::size_t i) {  // called by a mark; see Readiness
        if (sums_.holds(i)) sums_.add_last(i, gradient(i), storage_.parameter(i));
        else if (marks_[i].copied) passes_.copy(marks_[i].gradient, storage_.parameter(i));
    }
    /// The same without the last micro-batch, which did not use it.
    void deposit_sum(std::size_t i) { sums_.add_last(i, {}, storage_.parameter(i)); }

    /// Zeroes gradient i in its bucket, because this rank contributes nothing.
    void clear(std::size_t i) { passes_.clear(storage_.parameter(i)); }
    /// The same for all of bucket b.
    void clear_bucket(std::size_t b) { passes_.clear(storage_.bucket(b)); }

    /// Copies the results of bucket b to the trainer's gradients i for which `wanted(i)`.
    template <class Wanted>
    void hand_out(std::size_t b, Wanted&& wanted) {
        for (std::size_t i : plan_.bucket(b))
            if (is_copied(i) && wanted(i)) passes_.copy(storage_.parameter(i), marks_[i].gradient);
    }

    /// Makes the first element of each gradient that the results of bucket b will be copied to a NaN, so that nobody trains on what is there
    /// before. In host memory.
    void spoil(std::size_t b) noexcept {
        if constexpr (B::memory_space == MemorySpace::host)
            for (std::size_t i : plan_.bucket(b))
                if (const BufferView g = parameters_[i].gradient; is_copied(i) && g.count != 0 && is_floating(g.dtype))
                    std::memset(g.data, 0xff, size_of(g.dtype));  // a NaN in each of the types
    }

    /// Saves gradient i, if it lives in its bucket, in case no rank used it.
    void keep(std::size_t i) {
        if (!live_here() || scattered_) return;
        const BufferView slot = storage_.parameter(i);
        const std::size_t end = kept_bytes_.size();
        kept_.push_back(i);
        kept_bytes_.resize(end + slot.bytes());
        passes_.read(slot, kept_bytes_.data() + end);
    }
    /// Restores the saved gradients i for which `unused(i)`.
    template <class Unused>
    void restore(Unused&& unused) {
        const std::uint8_t* bytes = kept_bytes_.data();
        for (std::size_t i : kept_) {
            const BufferView slot = storage_.parameter(i);
            if (unused(i)) passes_.write(bytes, slot);
            bytes += slot.bytes();
        }
        kept_.clear();
        kept_bytes_.clear();
    }

    /// Plans anew for another order of readiness, and moves values and sums along. Returns true if the plan changed. Collective.
    [[gnu::cold]] bool reorder(B& backend, std::span<const std::uint64_t> order) {
        for (std::size_t k = 0; k < order_.size(); ++k) order_[k] = order[k];
        BucketPlan plan = make_plan(backend);
        if (plan == plan_) return false;
        plan_ = std::move(plan);
        BucketStorage<B> storage = make_storage(backend);
        for (std::size_t i : order_)
            // Borrowed gradients stay in the trainer's memory: their buckets hold only sums of micro-batches.
            if (!pooled() && (live_here() || (sums_.holds(i) && !sums_.apart()))) passes_.copy(storage_.parameter(i), storage.parameter(i));
        storage_ = std::move(storage);
        allocate_shards(backend);
        prepare_marks();
        return true;
    }

    /// Moves the borrowed gradient i, in bucket b, to another memory.
    void rebind(std::size_t i, std::size_t b, BufferView gradient) {
        if (parameters_[i].requires_grad && is_direct(b)) storage_.rebind(b, i, gradient);
        parameters_[i].gradient = gradient;
        marks_[i] = mark_of(i);
    }

private:
    using Memory = decltype(std::declval<B&>().allocate(std::size_t{}));

    /// The part of a parameter that each step reads. These lie together, so that a step touches little memory.
    struct Mark {
        BufferView gradient;  ///< of the trainer
        bool copied;
    };
    Mark mark_of(std::size_t i) const noexcept {
        const BufferView gradient = parameters_[i].gradient;
        return {gradient, !live_here() && storage_.parameter(i).data != gradient.data};
    }
    [[gnu::cold]] void prepare_marks() {
        marks_.resize(parameters_.size());
        for (std::size_t i = 0; i < parameters_.size(); ++i) marks_[i] = mark_of(i);
    }

    using Place = typename MicroBatchSums<B>::Place;

    Place place_of_sums() const noexcept {
        if (options_.accumulation != Accumulation::in_buckets || pooled()) return Place::none;
        if (live_here()) return Place::gradient;
        return options_.reduce_dtype && is_low_precision(*options_.reduce_dtype) ? Place::apart : Place::slot;
    }
    /// The micro-batches of a step that each rank adds up; 0: unknown.
    std::size_t due(const B& backend) const noexcept {
        return options_.micro_batches == 0 ? 0 : micro_batches_each(options_, backend.size());
    }

    bool live_here() const noexcept { return options_.gradients != GradientStorage::borrowed; }

    BufferView own_part(std::size_t b) const noexcept { return shard_of(storage_.bucket(b), size_, rank_); }

    [[gnu::cold]] List<ParameterInfo> infos_for(const B& backend, [[maybe_unused]] bool packed) const {
        List<ParameterInfo> infos = bucket_infos(parameters_, options_, B::memory_space, scattered_, backend.rank(), backend.size());
        if constexpr (abilities_of<B>.cheaper_alone) {
            // Limited, so that a rank that is ahead need not wait for the others to start another one.
            constexpr std::size_t max_alone = 256;
            std::size_t alone = packed ? 0 : infos.size();
            for (std::size_t least = backend.cheaper_alone_from(); alone != 0; least *= 2) {
                alone = 0;
                for (std::size_t i = 0; i < infos.size(); ++i)
                    alone += infos[i].cheaper_alone = may_be_direct(i, infos[i]) && infos[i].bytes() >= least;
                if (alone <= max_alone) break;
            }
        }
        return infos;
    }

    [[gnu::cold]] BucketPlan make_plan(const B& backend) const {
        BucketPlan plan;
        // One rank sends nothing. With one bucket per gradient, borrowed gradients are not even copied.
        if (backend.size() == 1 && !live_here()) {
            for (const std::size_t& i : order_) plan.push_back({&i, 1});
            return plan;
        }
        plan = policy_.plan(infos_, order_);
        check_plan(plan, infos_, parameters_, policy_.describe(), backend.rank());
        return plan;
    }

    /// Is bucket b the gradient of its only parameter, in the trainer's own memory?
    bool is_direct(std::size_t b) const {
        const std::size_t i = plan_.bucket(b).front();
        return plan_.bucket(b).size() == 1 && may_be_direct(i, infos_[i]);
    }
    /// May a bucket use the memory of gradient i directly?
    bool may_be_direct(std::size_t i, const ParameterInfo& info) const {
        return parameters_[i].requires_grad && !live_here() && options_.unused == UnusedParameters::error &&
               options_.accumulation == Accumulation::in_gradients && info.dtype == parameters_[i].gradient.dtype;
    }

    [[gnu::cold]] BucketStorage<B> make_storage(B& backend) const {
        if (pooled()) return BucketStorage<B>::with_slots(backend, plan_, infos_, slots_needed());
        return BucketStorage<B>::with_memory(backend, plan_, infos_, parameters_, [this](std::size_t b) { return is_direct(b); });
    }

    /// The number of buckets that are filled at the same time, plus one in flight, if gradients are asked for in the order in which they
    /// are expected to become ready. A gradient of several uses is asked for at its first use.
    [[gnu::cold]] std::size_t slots_needed() const {
        List<std::size_t> bucket_of(parameters_.size()), missing(plan_.size());
        std::size_t open = 0, most = 0, early = 0;
        for (std::size_t b = 0; b < plan_.size(); ++b) {
            bool reused = false;
            for (std::size_t i : plan_.bucket(b)) {
                bucket_of[i] = b;
                reused = reused || parameters_[i].uses > 1;
            }
            missing[b] = plan_.bucket(b).size();
            early += reused ? 1 : 0;
        }
        for (std::size_t i : order_) {
            std::size_t& left = missing[bucket_of[i]];
            if (left == plan_.bucket(bucket_of[i]).size()) most = larger(most, ++open);
            if (--left == 0) --open;
        }
        return smaller(most + early + 1, plan_.size());
    }

    /// Allocates this rank's shards, in the type in which micro-batches are added up.
    [[gnu::cold]] void allocate_shards(B& backend) {
        if (!pooled()) return;
        shards_ = List<BufferView>(plan_.size());
        for (std::size_t b = 0; b < plan_.size(); ++b)  // as large as that of rank 0, because every rank allocates the same number of bytes
            shards_[b] =
                typed_view(nullptr, shard_range(storage_.bucket(b).count, size_, 0).size(), accumulator_of(storage_.bucket(b).dtype));
        shard_sums_.allocate(backend, shards_);
        shard_bytes_ = allocate_lines(backend, shards_, shard_memory_) + shard_sums_.bytes();
        for (std::size_t b = 0; b < plan_.size(); ++b) shards_[b].count = shard_range(storage_.bucket(b).count, size_, rank_).size();
    }

    ReducerOptions options_;
    bool scattered_;  ///< only the shards are used once a bucket's collective is complete
    int size_, rank_;
    const AnyBuckets& policy_;
    List<ParameterView> parameters_;
    List<ParameterInfo> infos_;
    List<std::size_t> order_;
    BucketPlan plan_;
    BucketStorage<B> storage_;
    std::mutex slots_;
    Memory shard_memory_{};
    List<BufferView> shards_;  ///< by bucket; only if gradients are pooled
    std::size_t shard_bytes_ = 0;
    MicroBatchSums<B> sums_, shard_sums_;
    [[no_unique_address]] PassesOf<B> passes_;
    List<Mark> marks_;               ///< by parameter
    List<std::uint8_t> asked_for_;   ///< by parameter, in this backward; only if gradients are pooled
    List<std::size_t> kept_;         ///< saved gradients, in case no rank used them
    List<std::uint8_t> kept_bytes_;  ///< their contents, one after the other
};

}  // namespace gradsync::inline v0_2::detail
