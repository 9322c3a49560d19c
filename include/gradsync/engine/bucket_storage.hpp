// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/parameter.hpp"
#include "../kernel/host_buffer.hpp"
#include "bucket_layout.hpp"
#include "dealt_sums.hpp"
#include "micro_batch_sums.hpp"
#include "options.hpp"

namespace gradsync::inline v0_2::detail {

/// The memory of the buckets: one allocation, zeroed at first, in which each bucket is contiguous. Either every bucket
/// has its own memory, or buckets share slots and hold one only while they need memory.
template <Backend B>
class BucketStorage {
public:
    BucketStorage() = default;

    /// `direct`, by bucket: the range of the trainer's memory that holds exactly its gradients; without memory if there
    /// is none. `images`: the number of copies of every other bucket; the views show the first copy. Collective, like
    /// the backend's `allocate`.
    [[gnu::cold]] static BucketStorage with_memory(B& backend, const BucketPlan& plan, BucketLayout layout,
                                                   ListView<const ParameterInfo> infos,
                                                   ListView<const ParameterView> parameters,
                                                   ListView<const BufferView> direct, std::size_t images) {
        BucketStorage storage(plan, std::move(layout), infos);
        std::size_t total = 0;
        for (std::size_t b = 0; b < plan.size(); ++b) {
            if (direct[b].data == nullptr) total += in_lines(storage.buckets_[b].bytes());
            else storage.lay_over(b, plan.bucket(b), parameters, direct[b]);
        }
        storage.image_bytes_ = total;
        storage.allocate(backend, total * images);
        auto* next = static_cast<std::byte*>(storage.memory_.data());
        for (std::size_t b = 0; b < plan.size(); ++b) {
            if (direct[b].data != nullptr) continue;
            storage.place(b, plan.bucket(b), next);
            next += in_lines(storage.buckets_[b].bytes());
        }
        return storage;
    }

    /// Makes slots, sized for the largest buckets. Gradients of another type than their bucket lie behind it in its
    /// slot. Collective.
    [[gnu::cold]] static BucketStorage with_slots(B& backend, const BucketPlan& plan, BucketLayout layout,
                                                  ListView<const ParameterInfo> infos,
                                                  ListView<const ParameterView> parameters, SlotNeeds needs) {
        BucketStorage storage(plan, std::move(layout), infos);
        bool differ = false;
        for (std::size_t b = 0; b < plan.size(); ++b)
            for (std::size_t i : plan.bucket(b)) differ = differ || parameters[i].gradient.dtype != infos[i].dtype;
        if (differ) {
            storage.written_ = storage.parameters_;
            for (std::size_t i = 0; i < parameters.size(); ++i)
                storage.written_[i].dtype = parameters[i].gradient.dtype;
        }
        storage.slot_of_.resize(plan.size());
        storage.slots_.resize(needs.slots);
        storage.stays_open_ = std::move(needs.stays_open);
        for (std::size_t b = 0; b < plan.size(); ++b) {  // each replaces the smallest so far
            std::size_t bytes = storage.slot_bytes(b, plan.bucket(b));
            for (Slot& slot : storage.slots_)
                if (slot.bytes < bytes) std::swap(slot.bytes, bytes);
        }
        std::size_t total = 0;
        for (const Slot& slot : storage.slots_) total += slot.bytes;
        storage.allocate(backend, total);
        auto* next = static_cast<std::byte*>(storage.memory_.data());
        for (Slot& slot : storage.slots_) next = (slot.data = next) + slot.bytes;
        return storage;
    }

    /// The memory that collectives read and write.
    BufferView bucket(std::size_t b) const noexcept { return buckets_[b]; }
    /// The part of parameter i within its bucket.
    BufferView parameter(std::size_t i) const noexcept { return parameters_[i]; }
    /// The memory to write gradient i to, if it does not live with the trainer.
    BufferView written(std::size_t i) const noexcept { return written_.empty() ? parameters_[i] : written_[i]; }
    /// The same part in image `number`.
    BufferView image(BufferView view, std::size_t number) const noexcept {
        view.data = static_cast<std::byte*>(view.data) + number * image_bytes_;
        return view;
    }
    std::size_t image_bytes() const noexcept { return image_bytes_; }
    const BucketLayout& layout() const noexcept { return layout_; }
    std::size_t bytes() const noexcept { return bytes_; }  ///< of allocated memory

    void rebind(std::size_t b, std::size_t i, BufferView gradient) noexcept { buckets_[b] = parameters_[i] = gradient; }
    /// Moves bucket b from the trainer's memory to memory of its own outside the backend's, which is a little slower
    /// between processes.
    void detach(std::size_t b, std::span<const std::size_t> parameters)
        requires(B::memory_space == MemorySpace::host)
    {
        place(b, parameters, more_memory(in_lines(buckets_[b].bytes())));
    }

    // For slots. Call from one thread at a time. `parameters` are those of bucket b.

    bool has_slot(std::size_t b) const noexcept { return buckets_[b].data != nullptr || buckets_[b].count == 0; }
    /// Takes the smallest free slot that is large enough; false if there is none. The slot still holds the data of its
    /// previous bucket. With `waits`, a bucket that stays open leaves a slot that is larger than another one that is
    /// taken: a larger bucket may come.
    bool take_slot(std::size_t b, std::span<const std::size_t> parameters, bool waits) noexcept {
        const std::size_t bytes = slot_bytes(b, parameters);
        std::size_t best = slots_.size(), least = static_cast<std::size_t>(-1);
        for (std::size_t s = 0; s < slots_.size(); ++s) {
            if (slots_[s].bytes < bytes) continue;
            least = smaller(least, slots_[s].bytes);
            if (!slots_[s].taken && (best == slots_.size() || slots_[s].bytes < slots_[best].bytes)) best = s;
        }
        if (best == slots_.size() || (waits && stays_open_[b] != 0 && slots_[best].bytes > least)) return false;
        slots_[best].taken = true;
        slot_of_[b] = best;
        place(b, parameters, slots_[best].data);
        return true;
    }
    void return_slot(std::size_t b, std::span<const std::size_t> parameters) noexcept {
        slots_[slot_of_[b]].taken = false;
        place(b, parameters, nullptr);
    }
    /// Gives bucket b a new slot outside the backend's memory. It is a little slower between processes,
    /// because it has to be copied.
    void add_slot(std::size_t b, std::span<const std::size_t> parameters)
        requires(B::memory_space == MemorySpace::host)
    {
        std::byte* const data = more_memory(slot_bytes(b, parameters));
        slot_of_[b] = slots_.size();
        slots_.push_back({data, more_memory_.back().bytes(), true});
        place(b, parameters, data);
    }

private:
    using Memory = decltype(std::declval<B&>().allocate(std::size_t{}));

    struct Slot {
        std::byte* data = nullptr;
        std::size_t bytes = 0;
        bool taken = false;
    };

    [[gnu::cold]] BucketStorage(const BucketPlan& plan, BucketLayout layout, ListView<const ParameterInfo> infos)
        : layout_(std::move(layout)), buckets_(plan.size()), parameters_(infos.size()) {
        for (std::size_t b = 0; b < plan.size(); ++b) {
            buckets_[b] = typed_view(nullptr, layout_.counts[b], infos[plan.bucket(b).front()].dtype, B::memory_space);
            for (std::size_t i : plan.bucket(b))
                parameters_[i] = typed_view(nullptr, infos[i].count, infos[i].dtype, B::memory_space);
        }
    }

    void allocate(B& backend, std::size_t bytes) {
        memory_ = backend.allocate(bytes);
        bytes_ = bytes;
    }

    bool lies_behind(std::size_t i) const noexcept {
        return !written_.empty() && written_[i].dtype != parameters_[i].dtype;
    }
    std::size_t slot_bytes(std::size_t b, std::span<const std::size_t> parameters) const noexcept {
        std::size_t bytes = in_lines(buckets_[b].bytes());
        for (std::size_t i : parameters)
            if (lies_behind(i)) bytes += in_lines(written_[i].bytes());
        return bytes;
    }

    std::byte* more_memory(std::size_t bytes) {
        more_memory_.push_back(kernel::HostBuffer(bytes));
        bytes_ += more_memory_.back().bytes();
        return static_cast<std::byte*>(more_memory_.back().data());
    }

    void lay_over(std::size_t b, std::span<const std::size_t> bucket, ListView<const ParameterView> parameters,
                  BufferView range) {
        for (std::size_t i : bucket) {
            parameters_[i] = parameters[i].gradient;
            layout_.offsets[i] = distance(range, parameters_[i]);
        }
        layout_.counts[b] = range.count;
        buckets_[b] = range;
    }

    void place(std::size_t b, std::span<const std::size_t> parameters, std::byte* memory) noexcept {
        buckets_[b].data = memory;
        std::size_t behind = in_lines(buckets_[b].bytes());
        for (std::size_t i : parameters) {
            parameters_[i].data =
                memory == nullptr ? nullptr : memory + layout_.offsets[i] * size_of(parameters_[i].dtype);
            if (written_.empty()) continue;
            written_[i].data = memory == nullptr || !lies_behind(i) ? parameters_[i].data : memory + behind;
            if (lies_behind(i)) behind += in_lines(written_[i].bytes());
        }
    }

    BucketLayout layout_;
    Memory memory_{};
    std::size_t bytes_ = 0, image_bytes_ = 0;
    List<BufferView> buckets_, parameters_;
    List<BufferView> written_;  ///< by parameter, if a gradient has another type than its bucket; see `written`
    List<Slot> slots_;
    List<std::size_t> slot_of_;      ///< by bucket: its slot, while it has one
    List<std::uint8_t> stays_open_;  ///< see SlotNeeds
    List<kernel::HostBuffer> more_memory_;
};

/// Allocates memory for the views, each aligned to 64 bytes, and returns the number of bytes. Collective.
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

/// This rank's shards of the buckets, if gradients are sharded: the running sums over a step's micro-batches. Each
/// reduction adds to them.
template <Backend B>
class GradientShards {
public:
    GradientShards(B& backend, const ReducerOptions& options)
        : passes_(passes_of(backend)),
          factor_(options.averaging == Averaging::mean && options.micro_batches != 0
                      ? 1.0 / static_cast<double>(options.micro_batches)
                      : 1),
          low_factor_(factor_ * larger(sum_divisor(options, DType::f16, backend.size()), 1.0)),
          sums_(backend, 0) {}

    /// Allocates for the buckets of `storage`, which are reduced as `sums` says. No sum exists yet. Collective.
    void allocate(B& backend, const BucketStorage<B>& storage, std::size_t buckets, const DealtSums& sums) {
        const DealtSums::Needs needs = sums.needs();
        leaves_ = sums.leaves();
        buckets_ = buckets;
        first_part_ = needs.places * buckets;
        views_.resize(first_part_ + needs.parts * buckets);
        for (std::size_t k = 0; k < views_.size(); ++k) {
            const BufferView bucket = storage.bucket(k % buckets);
            const DType dtype = k < first_part_ ? accumulator_of(bucket.dtype) : bucket.dtype;
            // Rank 0's size, because every rank must allocate the same number of bytes.
            views_[k] = typed_view(nullptr, shard_range(bucket.count, backend.size(), 0).size(), dtype);
        }
        bytes_ = allocate_lines(backend, views_, memory_);
        sums_.reset(buckets);
        if (first_part_ > buckets)
            sums_.set_stride(static_cast<std::size_t>(static_cast<std::byte*>(views_[buckets].data) -
                                                      static_cast<std::byte*>(views_[0].data)));
        for (std::size_t k = 0; k < views_.size(); ++k)
            views_[k].count = shard_range(storage.bucket(k % buckets).count, backend.size(), backend.rank()).size();
    }
    std::size_t bytes() const noexcept { return bytes_; }

    BufferView operator[](std::size_t b) const noexcept { return views_[b]; }
    /// The memory for this rank's shard of sum k of bucket b, if a round has several sums.
    BufferView part(std::size_t k, std::size_t b) const noexcept { return views_[first_part_ + k * buckets_ + b]; }

    /// Adds the next sum, over `leaves` of `DealtSums::leaves()`, to the shard of bucket b. The last sum of a step
    /// completes the shard.
    void add(std::size_t b, BufferView sum, std::size_t leaves) {
        if (leaves_ == 0) return sums_.push_in_a_row(b, sum, views_[b]);
        if (sums_.leaves(b) + leaves != leaves_) return sums_.push(b, sum, views_[b], leaves);
        sums_.fold(b, sum, views_[b], views_[b]);
        const double factor = is_low_precision(sum.dtype) ? low_factor_ : factor_;
        if (factor != 1) passes_.scale(views_[b], factor);
    }
    void forget() noexcept { sums_.forget(); }

private:
    [[no_unique_address]] PassesOf<B> passes_;
    const double factor_, low_factor_;  ///< of a step's sum, by the type in which the sums travel
    decltype(std::declval<B&>().allocate(std::size_t{})) memory_{};
    List<BufferView> views_;  ///< by place and bucket, then by part and bucket
    std::size_t leaves_ = 0, buckets_ = 0, first_part_ = 0, bytes_ = 0;
    SumStacks<B> sums_;  ///< by bucket
};

}  // namespace gradsync::inline v0_2::detail
