// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "planned_parameters.hpp"
#include "round_sums.hpp"

namespace gradsync::inline v0_2::detail {

/// Holds the gradients, and moves them into the buckets and back. The engine decides when. `add_up`, `deposit` and
/// `rebind` may run concurrently for different gradients; `marked_bucket` for one bucket at a time.
template <Backend B>
class GradientHome {
public:
    /// The facts about one parameter that every step reads. They lie together, so that a step touches little memory.
    struct Row {
        BufferView gradient;  ///< of the trainer
        std::size_t bytes;    ///< of the gradient
        bool copied;          ///< the gradient is copied into its bucket, and the result back
        bool deposited;       ///< a mark must `deposit` it
    };

    /// Plans the buckets without allocating them. `options` and `policies` outlive this. Throws Error if parameters,
    /// options and policy do not fit together.
    [[gnu::cold]] GradientHome(B& backend, List<ParameterView> parameters, const ReducerOptions& options,
                               const Policies<B>& policies)
        : options_(options),
          planned_(backend, std::move(parameters), options, policies),
          rounds_(backend, options, policies, storage_, sums_),
          sums_(backend, planned_.size(), place_of_sums(), rounds_.deal(), rounds_.dealt().several() && !pooled()),
          passes_(passes_of(backend)),
          keeps_(options.gradients == GradientStorage::in_buckets &&
                 (policies.decoupled || !policies.exchange->traits.scatters)) {}

    /// Allocates the buckets. Call it first, once all ranks are known to have the same plan. Collective.
    [[gnu::cold]] void allocate(B& backend) {
        storage_ = make_storage(backend);
        rounds_.allocate(backend);
        if (sums_.apart()) {
            List<BufferView> sums;
            for (const ParameterInfo& info : planned_.infos())
                sums.push_back(typed_view(nullptr, info.count, accumulator_of(info.dtype), B::memory_space));
            sums_apart_ = Arrays<B>("sums of micro-batches", backend, std::move(sums), sums_.places());
        }
        prepare();
    }
    /// Plans for another order of readiness, and moves values and sums along. Returns true if the plan changed.
    /// Collective.
    [[gnu::cold]] bool reorder(B& backend, std::span<const std::uint64_t> order) {
        if (!planned_.reorder(backend, order)) return false;
        BucketMemory<B> storage = make_storage(backend);
        for (const std::size_t i : planned_.order())
            // Borrowed gradients stay in the trainer's memory: their buckets hold only sums of micro-batches.
            for (std::size_t k = 0; !pooled() && (live_here() || sums_.holds(i)) && k < rounds_.images(); ++k)
                passes_.copy(storage_.image(storage_.parameter(i), k), storage.image(storage.parameter(i), k));
        storage_ = std::move(storage);
        rounds_.allocate(backend);
        prepare();
        return true;
    }

    const PlannedParameters<B>& planned() const noexcept { return planned_; }
    PlannedParameters<B>& planned() noexcept { return planned_; }
    /// The memory of the buckets.
    const BucketMemory<B>& storage() const noexcept { return storage_; }
    const Row& row(std::size_t i) const noexcept { return rows_[i]; }
    /// The memory in which the trainer finds gradient i.
    BufferView gradient(std::size_t i) const noexcept {
        return live_here() && planned_[i].requires_grad ? storage_.written(i) : planned_[i].gradient;
    }
    /// Bytes of memory that the library owns.
    std::size_t bytes() const noexcept { return storage_.bytes() + sums_apart_.bytes() + rounds_.bytes(); }

    // -------------------------------------------------------------------------------------------- sums over the ranks

    RoundSums<B>& rounds() noexcept { return rounds_; }

    // ------------------------------------------------------------------------ the memory of buckets, while needed

    /// Do buckets have memory only while they need it? If so, call `obtain` before writing a gradient, and `land` after
    /// the collective of its bucket.
    bool pooled() const noexcept { return options_.gradients == GradientStorage::pooled; }
    /// Gives bucket b a slot; false if it should wait for one. With `more` it takes any, or in host memory adds one.
    /// For any thread.
    bool obtain(std::size_t b, bool more = false) {
        std::lock_guard lock(slots_);
        if (storage_.buckets()[b].data != nullptr || storage_.buckets()[b].count == 0) return true;
        if (storage_.take(b, true, !more && B::memory_space != MemorySpace::host)) return true;
        if constexpr (B::memory_space == MemorySpace::host)
            if (more) return storage_.place(HostPasses(), b, true, storage_[b].bytes), true;
        return false;
    }
    /// Call when bucket b is reduced. Adds up its sums, or adds them to this rank's shard and frees the slot.
    void land(std::size_t b) {
        rounds_.add_up(b);
        if (!pooled()) return;
        std::lock_guard lock(slots_);
        storage_.displace(b);
    }

    // ----------------------------------------------------------------------------------------------- into the buckets

    /// The sums of earlier micro-batches of this step.
    MicroBatchSums<B>& sums() noexcept { return sums_; }
    /// Adds gradient i to the sums of its micro-batches. More micro-batches follow.
    [[gnu::noinline]] void add_up(std::size_t i) { sums_.add(i, gradient(i), first_sum(i)); }

    /// Puts the complete gradient i into its bucket, together with the sums of earlier micro-batches.
    GRADSYNC_ALWAYS_INLINE void deposit(std::size_t i) {  // called by a mark; see Readiness
        if (sums_.holds(i) || sums_.leaves_roots()) deposit(i, gradient(i));
        else if (rows_[i].copied)
            passes_.copy(pooled() ? storage_.written(i) : rows_[i].gradient, storage_.parameter(i));
    }
    /// The same with the gradient of the last micro-batch, or with {} if the last one did not use it.
    [[gnu::noinline]] void deposit(std::size_t i, BufferView last) {
        sums_.add_last(i, last, first_sum(i), storage_.parameter(i));
    }
    /// Zeroes gradient i in its bucket, because this rank contributes nothing.
    [[gnu::noinline]] void clear(std::size_t i) {
        for (std::size_t image = 0; image < rounds_.images(); ++image)
            passes_.clear(storage_.image(storage_.parameter(i), image));
    }

    /// Moves the borrowed gradient i, in bucket b, to another memory. Returns false if it cannot leave an arena of
    /// device memory.
    [[nodiscard]] bool rebind(std::size_t i, std::size_t b, BufferView gradient) {
        const bool direct = planned_[i].requires_grad && !rows_[i].copied;
        const bool leaves = direct && planned_.plan().bucket(b).size() > 1;
        if (leaves && B::memory_space != MemorySpace::host) return false;
        planned_.set_gradient(i, gradient);
        if (leaves) return some_left_.store(true, std::memory_order_relaxed), true;
        if (direct) storage_.rebind(b, gradient);
        rows_[i] = row_of(i);
        return true;
    }
    /// The memory of bucket b, all of which is marked. If gradients have left the range of the trainer's memory that
    /// the bucket was, they are copied to memory of its own.
    BufferView marked_bucket(std::size_t b) {
        if (some_left_.load(std::memory_order_relaxed)) move_out(b);
        return storage_.buckets()[b];
    }

    // ---------------------------------------------------------------------------------------------- out of the buckets

    /// Copies the results of bucket b to the trainer's gradients i for which `wanted(i)`.
    void hand_out(std::size_t b, auto&& wanted) {
        for (std::size_t i : planned_.plan().bucket(b))
            if (rows_[i].copied && wanted(i)) passes_.copy(storage_.parameter(i), rows_[i].gradient);
    }

    /// Copies gradient i, which this rank did not use, if it lives in its bucket: it comes back if no rank used it.
    void keep(std::size_t i) {
        if (!keeps_) return;
        kept_.push_back(i);
        kept_bytes_.resize(kept_bytes_.size() + gradient(i).bytes());
        passes_.read(gradient(i), kept_bytes_.end() - gradient(i).bytes());
    }
    /// Writes the kept gradients i for which `unused(i)` back, and forgets all.
    void restore(auto&& unused) {
        const std::uint8_t* bytes = kept_bytes_.data();
        for (const std::size_t i : kept_) {
            if (unused(i)) passes_.write(bytes, gradient(i));
            bytes += gradient(i).bytes();
        }
        kept_.clear();
        kept_bytes_.clear();
    }

private:
    bool live_here() const noexcept { return options_.gradients != GradientStorage::borrowed; }

    Row row_of(std::size_t i) const noexcept {
        const BufferView gradient = planned_[i].gradient;
        const bool copied = live_here() ? storage_.parameter(i).dtype != storage_.written(i).dtype
                                        : storage_.parameter(i).data != gradient.data;
        return {gradient, gradient.bytes(), copied, copied || sums_.in_place()};
    }
    [[gnu::cold, gnu::noinline]] void move_out(std::size_t b) {
        const std::span<const std::size_t> all = planned_.plan().bucket(b);
        bool left = false;
        for (const std::size_t i : all) left = left || (!rows_[i].copied && row_of(i).copied);
        if (!left) return;
        if constexpr (B::memory_space == MemorySpace::host) storage_.detach(b);
        for (const std::size_t i : all) {
            rows_[i] = row_of(i);
            deposit(i);
        }
    }
    [[gnu::cold]] void prepare() {
        sums_.set_stride(sums_.apart() ? sums_apart_.image_bytes() : storage_.image_bytes());
        rows_.resize(planned_.size());
        for (std::size_t i = 0; i < rows_.size(); ++i) rows_[i] = row_of(i);
    }

    using Place = typename MicroBatchSums<B>::Place;
    Place place_of_sums() const noexcept {
        if (options_.accumulation != Accumulation::in_buckets || pooled()) return Place::none;
        if (live_here()) return Place::gradient;
        return options_.reduce_dtype && is_low_precision(*options_.reduce_dtype) ? Place::apart : Place::slot;
    }
    /// Place 0 of the sums of gradient i.
    BufferView first_sum(std::size_t i) const noexcept {
        return sums_.apart() ? sums_apart_[i] : storage_.image(storage_.parameter(i), sums_.in_place() ? 1 : 0);
    }

    [[gnu::cold]] BucketMemory<B> make_storage(B& backend) const {
        const BucketPlan& plan = planned_.plan();
        const List<ParameterInfo>& infos = planned_.infos();
        BucketLayout layout = planned_.layout();
        List<BufferView> buckets = pooled() ? List<BufferView>(plan.size()) : planned_.direct_buckets(backend);
        std::size_t direct = 0;
        for (std::size_t b = 0; b < plan.size(); ++b) {
            if (buckets[b].data == nullptr) {
                buckets[b] =
                    typed_view(nullptr, layout.counts[b], infos[plan.bucket(b).front()].dtype, B::memory_space);
                continue;
            }
            ++direct;
            layout.counts[b] = buckets[b].count;
            for (std::size_t i : plan.bucket(b)) layout.offsets[i] = distance(buckets[b], planned_[i].gradient);
        }
        BucketMemory<B> storage(plan, std::move(layout), infos, std::move(buckets), pooled() ? plan.size() : 1,
                                [&](std::size_t b) { return pooled() ? b : 0; });
        if (pooled()) {
            for (std::size_t i : planned_.order())
                if (planned_[i].gradient.dtype != infos[i].dtype) storage.write_behind(i, planned_[i].gradient.dtype);
            const bool unused =
                B::memory_space != MemorySpace::host && options_.unused == UnusedParameters::find_unused;
            storage.make_slots(backend, slots_needed(plan, planned_.parameters(), planned_.order(), unused));
        } else {
            debug(DebugLevel::info, backend.rank(), direct, " of ", plan.size(),
                  " buckets are the trainer's own memory; the others have memory of the library");
            storage.place_images(backend, rounds_.images());
        }
        return storage;
    }

    const ReducerOptions& options_;
    PlannedParameters<B> planned_;
    BucketMemory<B> storage_;
    std::mutex slots_;
    RoundSums<B> rounds_;
    MicroBatchSums<B> sums_;
    Arrays<B> sums_apart_;  ///< by place and parameter
    [[no_unique_address]] PassesOf<B> passes_;
    List<Row> rows_;                      ///< by parameter
    std::atomic<bool> some_left_{false};  ///< some gradients have left the range that was their bucket; see `rebind`
    const bool keeps_;                    ///< gradients live in buckets whose results are whole
    List<std::size_t> kept_;              ///< parameters; see `keep`
    List<std::uint8_t> kept_bytes_;       ///< their gradients, one after the other
};

}  // namespace gradsync::inline v0_2::detail
