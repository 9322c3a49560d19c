// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/shared.hpp"
#include "bucket_layout.hpp"
#include "micro_batch_sums.hpp"

namespace gradsync::inline v0_2::detail {

/// Memory of a `Source` for `what`, such as "buckets". Throws Error(storage), which names it, if there is too little.
template <class Source>
[[gnu::cold]] auto memory_for(const char* what, Source&& source, std::size_t bytes) {
    try {
        return source.allocate(bytes);
    } catch (const std::bad_alloc&) {
        raise(Errc::storage, {.operation = "allocate"}, "there is no memory for ", bytes, " bytes of ", what,
              "; use a smaller model, or shard it over more ranks");
    }
}

/// Arrays in one allocation of a `Source`, each on lines of its own, or several images of them one after the other.
template <class Source>
class Arrays {
public:
    Arrays() = default;
    /// `what`: for an error. `views`: those that have memory keep it; it has no images.
    [[gnu::cold]] Arrays(const char* what, Source& source, List<BufferView> views, std::size_t images = 1)
        : views_(std::move(views)) {
        for (const BufferView& view : views_) image_bytes_ += view.data == nullptr ? in_lines(view.bytes()) : 0;
        bytes_ = image_bytes_ * images;
        memory_ = memory_for(what, source, bytes_);
        if (bytes_ == 0) return;
        auto* next = static_cast<std::byte*>(memory_.data());
        for (BufferView& view : views_)
            if (view.data == nullptr) {
                view.data = next;
                next += in_lines(view.bytes());
            }
    }

    BufferView operator[](std::size_t k) const noexcept { return views_[k]; }
    BufferView image(std::size_t k, std::size_t number) const noexcept {
        return shifted(views_[k], number * image_bytes_);
    }
    std::size_t image_bytes() const noexcept { return image_bytes_; }
    std::size_t bytes() const noexcept { return bytes_; }  ///< of allocated memory

private:
    decltype(std::declval<Source&>().allocate(std::size_t{})) memory_{};
    List<BufferView> views_;
    std::size_t image_bytes_ = 0, bytes_ = 0;
};

/// The memory of buckets, of gradients or of values, zeroed at first. Buckets form units, and a unit has memory while
/// it has a slot; its buckets lie there side by side. Buckets that are ranges of the trainer's memory need no slot. Not
/// thread-safe.
template <Backend B>
class BucketMemory {
public:
    struct Unit {
        static constexpr std::size_t none = static_cast<std::size_t>(-1);
        List<std::size_t> buckets;  ///< those that need a slot
        std::size_t bytes = 0;
        std::size_t slot = none;
        std::size_t users = 0;
        bool gathering = false;
        std::uint64_t released = 0;  ///< number of releases at that time
    };

    BucketMemory() = default;
    /// `buckets`: those with memory keep it; there `layout` has the order of the trainer. `unit_of(b)`: the unit of
    /// bucket b, below `units`.
    [[gnu::cold]] BucketMemory(const BucketPlan& plan, BucketLayout layout, ListView<const ParameterInfo> infos,
                               List<BufferView> buckets, std::size_t units, auto&& unit_of)
        : plan_(plan),
          layout_(std::move(layout)),
          buckets_(std::move(buckets)),
          units_(units),
          bucket_of_(infos.size()),
          parameters_(infos.size()) {
        for (std::size_t b = 0; b < plan_.size(); ++b) {
            for (std::size_t i : plan_.bucket(b)) {
                bucket_of_[i] = b;
                parameters_[i] = typed_view(nullptr, infos[i].count, buckets_[b].dtype, B::memory_space);
            }
            if (buckets_[b].data != nullptr) {
                move(b, static_cast<std::byte*>(buckets_[b].data));
                continue;
            }
            Unit& unit = units_[unit_of(b)];
            unit.buckets.push_back(b);
            unit.bytes += in_lines(buckets_[b].bytes());
        }
    }

    /// Gradient i has another type than its bucket, and is written behind it, in the slot of the bucket's unit.
    [[gnu::cold]] void write_behind(std::size_t i, DType dtype) {
        Unit& unit = units_[bucket_of_[i]];
        written_.resize(parameters_.size());
        written_[i] = {typed_view(nullptr, parameters_[i].count, dtype, B::memory_space), unit.bytes};
        unit.bytes += in_lines(written_[i].view.bytes());
    }
    /// Gives the only unit memory for `images` copies; views show the first one. Collective.
    [[gnu::cold]] void place_images(B& backend, std::size_t images) {
        image_bytes_ = units_[0].bytes;
        place(backend, 0, true, image_bytes_ * images);
    }
    /// Makes slots for the largest units. Collective.
    [[gnu::cold]] void make_slots(B& backend, SlotNeeds needs) {
        List<std::size_t> sizes;
        for (const Unit& unit : units_) sizes.push_back(unit.bytes);
        sort_by(sizes, [](std::size_t one, std::size_t other) { return one > other; });
        sizes.resize(needs.slots);
        stays_open_ = std::move(needs.stays_open);
        add_slots(backend, sizes);
    }

    Unit& operator[](std::size_t u) noexcept { return units_[u]; }
    const Unit& operator[](std::size_t u) const noexcept { return units_[u]; }
    const BucketLayout& layout() const noexcept { return layout_; }
    std::size_t bytes() const noexcept { return bytes_; }  ///< of allocated memory

    /// The memory that collectives read and write; none while the unit has no slot.
    const List<BufferView>& buckets() const noexcept { return buckets_; }
    /// The bucket of trainable parameter i, and its part of the bucket.
    std::size_t bucket_of(std::size_t i) const noexcept { return bucket_of_[i]; }
    BufferView parameter(std::size_t i) const noexcept { return parameters_[i]; }
    /// The memory to write gradient i to, if it does not live with the trainer.
    BufferView written(std::size_t i) const noexcept {
        if (written_.empty() || written_[i].offset == none) return parameter(i);
        const BufferView bucket = buckets_[bucket_of_[i]];
        BufferView view = written_[i].view;
        if (bucket.data != nullptr) view.data = static_cast<std::byte*>(bucket.data) + written_[i].offset;
        return view;
    }
    /// The same part of a bucket in image `number`.
    BufferView image(BufferView view, std::size_t number) const noexcept {
        return shifted(view, number * image_bytes_);
    }
    /// The distance between the images of an array.
    std::size_t image_bytes() const noexcept { return image_bytes_; }

    /// Gives unit u the smallest slot that is large enough; of equal ones a free one, or else the one released first.
    /// Units in use keep their slots; with `keep`, so do all. The slot still holds the data of its previous unit.
    /// Returns false if there is none. With `waits`, a unit that stays open leaves a slot that is larger than another
    /// one that is taken: a larger unit may come.
    bool take(std::size_t u, bool keep, bool waits = false) noexcept {
        const auto age = [&](const Slot& slot) { return slot.unit == none ? 0 : 1 + units_[slot.unit].released; };
        Slot* best = nullptr;
        std::size_t least = none;
        for (Slot& slot : slots_) {
            if (slot.bytes < units_[u].bytes) continue;
            least = smaller(least, slot.bytes);
            if (slot.unit != none && (keep || units_[slot.unit].users != 0 || units_[slot.unit].gathering)) continue;
            if (best == nullptr || slot.bytes < best->bytes || (slot.bytes == best->bytes && age(slot) < age(*best)))
                best = &slot;
        }
        if (best == nullptr || (waits && stays_open_[u] != 0 && best->bytes > least)) return false;
        if (best->unit != none) displace(best->unit);
        best->unit = u;
        units_[u].slot = static_cast<std::size_t>(best - slots_.data());
        std::byte* next = best->data;
        for (const std::size_t b : units_[u].buckets) {
            move(b, next);
            next += in_lines(buckets_[b].bytes());
        }
        return true;
    }
    /// The same, if need be with a new slot of `bytes`. `source`: the backend, which makes it collective; or
    /// HostPasses, whose memory is a little slower between processes, because it has to be copied.
    void place(auto&& source, std::size_t u, bool keep, std::size_t bytes) {
        if (take(u, keep)) return;
        add_slots(source, {bytes});
        take(u, keep);
    }
    /// Takes unit u's slot away.
    void displace(std::size_t u) noexcept {
        Unit& unit = units_[u];
        if (unit.slot == none) return;
        slots_[unit.slot].unit = none;
        unit.slot = none;
        for (const std::size_t b : unit.buckets) move(b, nullptr);
    }
    /// Ends a use. A released unit keeps its slot until another one needs it, so that a unit that is used again soon
    /// need not be gathered again.
    void release(std::size_t u) noexcept {
        if (units_[u].users != 0 && --units_[u].users == 0) units_[u].released = ++releases_;
    }

    /// Moves bucket b from the trainer's memory to that of HostPasses.
    void detach(std::size_t b)
        requires(B::memory_space == MemorySpace::host)
    {
        add_slots(HostPasses(), {in_lines(buckets_[b].bytes())});
        move(b, slots_.back().data);
    }
    /// Moves bucket b to memory of the trainer.
    void rebind(std::size_t b, BufferView range) noexcept { move(b, static_cast<std::byte*>(range.data)); }
    /// Uses the memory of another rank, which is a thread of this process.
    [[gnu::cold]] void share(const BucketMemory& other) {
        slots_ = other.slots_;  // and shares their memory
        buckets_ = other.buckets_;
        parameters_ = other.parameters_;
        bytes_ = 0;
    }

private:
    static constexpr std::size_t none = Unit::none;

    struct Slot {
        Shared<void> memory;
        std::byte* data = nullptr;
        std::size_t bytes = 0;
        std::size_t unit = none;
    };
    struct Written {
        BufferView view = {};       ///< without memory
        std::size_t offset = none;  ///< in bytes, from the start of the bucket; `none` if it is written in its place
    };

    void move(std::size_t b, std::byte* data) noexcept {
        buckets_[b].data = data;
        for (const std::size_t i : plan_.bucket(b))
            parameters_[i].data = data == nullptr ? nullptr : data + layout_.offsets[i] * size_of(parameters_[i].dtype);
    }
    /// Makes slots, in one allocation.
    [[gnu::cold]] void add_slots(auto&& source, const List<std::size_t>& sizes) {
        using Memory = decltype(source.allocate(std::size_t{}));
        std::size_t total = 0;
        for (const std::size_t bytes : sizes) total += bytes;
        const auto memory = Shared<Memory>::make(memory_for("buckets", source, total));
        auto* next = static_cast<std::byte*>(memory->data());
        for (const std::size_t bytes : sizes) {
            slots_.push_back({memory, next, bytes, none});
            next += bytes;
        }
        bytes_ += total;
    }

    BucketPlan plan_;
    BucketLayout layout_;
    List<BufferView> buckets_;
    List<Unit> units_;
    List<Slot> slots_;
    List<std::size_t> bucket_of_;    ///< by parameter
    List<BufferView> parameters_;    ///< their parts of the buckets
    List<Written> written_;          ///< by parameter, if some are written behind their bucket
    List<std::uint8_t> stays_open_;  ///< by unit; see SlotNeeds
    std::size_t image_bytes_ = 0, bytes_ = 0;
    std::uint64_t releases_ = 0;
};

}  // namespace gradsync::inline v0_2::detail
