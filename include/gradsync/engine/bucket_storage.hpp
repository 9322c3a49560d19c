// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/backend.hpp"
#include "../core/parameter.hpp"
#include "../kernel/host_buffer.hpp"
#include "bucket_layout.hpp"

namespace gradsync::inline v0_2::detail {

/// The memory of the buckets: one allocation, zeroed at first, in which each bucket is contiguous. Either every bucket has memory of its
/// own, or buckets take slots while they need memory.
template <Backend B>
class BucketStorage {
public:
    BucketStorage() = default;

    /// `direct`, by bucket: the range of the trainer's memory that holds its gradients and nothing else; without memory if there is none.
    /// `images`: how often each other bucket has memory; the views are of its first image. Collective, like the backend's `allocate`.
    [[gnu::cold]] static BucketStorage with_memory(B& backend, const BucketPlan& plan, ListView<const ParameterInfo> infos,
                                                   ListView<const ParameterView> parameters, ListView<const BufferView> direct,
                                                   std::size_t images) {
        BucketStorage storage(plan, infos);
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

    /// Makes `slots` slots, which are as large as the largest buckets. Collective.
    [[gnu::cold]] static BucketStorage with_slots(B& backend, const BucketPlan& plan, ListView<const ParameterInfo> infos,
                                                  std::size_t slots) {
        BucketStorage storage(plan, infos);
        storage.slot_of_.resize(plan.size());
        storage.slots_.resize(slots);
        for (const BufferView& bucket : storage.buckets_) {  // each takes the place of the smallest
            std::size_t bytes = in_lines(bucket.bytes());
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
    /// The same part of image `number`.
    BufferView image(BufferView view, std::size_t number) const noexcept {
        view.data = static_cast<std::byte*>(view.data) + number * image_bytes_;
        return view;
    }
    std::size_t image_bytes() const noexcept { return image_bytes_; }
    const BucketLayout& layout() const noexcept { return layout_; }
    std::size_t bytes() const noexcept { return bytes_; }  ///< of allocated memory

    void rebind(std::size_t b, std::size_t i, BufferView gradient) noexcept { buckets_[b] = parameters_[i] = gradient; }
    /// Gives bucket b, which lay in the trainer's memory, memory of its own outside the backend's: a little slower between processes.
    void detach(std::size_t b, std::span<const std::size_t> parameters)
        requires(B::memory_space == MemorySpace::host)
    {
        place(b, parameters, more_memory(b));
    }

    // For slots; from one thread at a time. `parameters` are those of bucket b.

    bool has_slot(std::size_t b) const noexcept { return buckets_[b].data != nullptr || buckets_[b].count == 0; }
    /// Takes the smallest free slot that is large enough; false if there is none. It still holds the data of its previous bucket.
    bool take_slot(std::size_t b, std::span<const std::size_t> parameters) noexcept {
        std::size_t best = slots_.size();
        for (std::size_t s = 0; s < slots_.size(); ++s)
            if (!slots_[s].taken && slots_[s].bytes >= buckets_[b].bytes() &&
                (best == slots_.size() || slots_[s].bytes < slots_[best].bytes))
                best = s;
        if (best == slots_.size()) return false;
        slots_[best].taken = true;
        slot_of_[b] = best;
        place(b, parameters, slots_[best].data);
        return true;
    }
    void return_slot(std::size_t b, std::span<const std::size_t> parameters) noexcept {
        slots_[slot_of_[b]].taken = false;
        place(b, parameters, nullptr);
    }
    /// Adds a slot for bucket b outside the backend's memory: a little slower between processes, because it has to be copied.
    void add_slot(std::size_t b)
        requires(B::memory_space == MemorySpace::host)
    {
        std::byte* const data = more_memory(b);
        slots_.push_back({data, more_memory_.back().bytes()});
    }

private:
    using Memory = decltype(std::declval<B&>().allocate(std::size_t{}));

    struct Slot {
        std::byte* data = nullptr;
        std::size_t bytes = 0;
        bool taken = false;
    };

    [[gnu::cold]] BucketStorage(const BucketPlan& plan, ListView<const ParameterInfo> infos)
        : layout_(plan, infos), buckets_(plan.size()), parameters_(infos.size()) {
        for (std::size_t b = 0; b < plan.size(); ++b) {
            buckets_[b] = typed_view(nullptr, layout_.counts[b], infos[plan.bucket(b).front()].dtype, B::memory_space);
            for (std::size_t i : plan.bucket(b)) parameters_[i] = typed_view(nullptr, infos[i].count, infos[i].dtype, B::memory_space);
        }
    }

    void allocate(B& backend, std::size_t bytes) {
        memory_ = backend.allocate(bytes);
        bytes_ = bytes;
    }

    std::byte* more_memory(std::size_t b) {
        more_memory_.push_back(kernel::HostBuffer(in_lines(buckets_[b].bytes())));
        bytes_ += more_memory_.back().bytes();
        return static_cast<std::byte*>(more_memory_.back().data());
    }

    void lay_over(std::size_t b, std::span<const std::size_t> bucket, ListView<const ParameterView> parameters, BufferView range) {
        for (std::size_t i : bucket) {
            parameters_[i] = parameters[i].gradient;
            layout_.offsets[i] = distance(range, parameters_[i]);
        }
        layout_.counts[b] = range.count;
        buckets_[b] = range;
    }

    void place(std::size_t b, std::span<const std::size_t> parameters, std::byte* memory) noexcept {
        buckets_[b].data = memory;
        for (std::size_t i : parameters)
            parameters_[i].data = memory == nullptr ? nullptr : memory + layout_.offsets[i] * size_of(parameters_[i].dtype);
    }

    BucketLayout layout_;
    Memory memory_{};
    std::size_t bytes_ = 0, image_bytes_ = 0;
    List<BufferView> buckets_, parameters_;
    List<Slot> slots_;
    List<std::size_t> slot_of_;  ///< by bucket: its slot, while it has one
    List<kernel::HostBuffer> more_memory_;
};

}  // namespace gradsync::inline v0_2::detail
