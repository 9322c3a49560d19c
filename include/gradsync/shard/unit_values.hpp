// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/backend.hpp"
#include "../core/parameter.hpp"
#include "../core/shared.hpp"
#include "../engine/bucket_layout.hpp"
#include "../engine/weights.hpp"
#include "../kernel/passes.hpp"

namespace gradsync::inline v0_2::detail {

/// The dtype of the values of bucket b. Throws Error(invalid_argument) if they differ, because a bucket is gathered as
/// one buffer, or if a type is not floating-point.
inline DType value_dtype(const BucketPlan& plan, std::size_t b, std::span<const ParameterView> parameters,
                         const char* who, int rank) {
    const ParameterView& first = parameters[plan.bucket(b).front()];
    for (std::size_t i : plan.bucket(b)) {
        const ParameterView& p = parameters[i];
        std::string problem;
        if (!is_floating(p.value.dtype) || !is_floating(p.gradient.dtype))
            problem = "is not of a floating type; freeze it (requires_grad = false)";
        else if (p.value.dtype != first.value.dtype)
            problem = text("has values of ", p.value.dtype, ", but shares bucket ", b, " with '", first.name, "' of ",
                           first.value.dtype, "; put them in different buckets");
        if (!problem.empty())
            raise(Errc::invalid_argument, text(who, " on rank ", rank, ": parameter '", p.name, "' ", problem),
                  {.operation = who, .rank = rank, .parameter = p.name});
    }
    return first.value.dtype;
}

/// The parameters' values, laid out as the buckets of their gradients, so that ranks can gather them by bucket. Buckets
/// form units, and a unit has memory while it has a slot. A released unit stays until another one needs its slot, so
/// that a unit that is used again soon need not be gathered again. All ranks make the same calls.
template <Backend B>
class UnitValues {
public:
    static constexpr std::size_t none = static_cast<std::size_t>(-1);

    struct Unit {
        List<std::size_t> buckets;
        std::size_t bytes = 0;
        std::size_t slot = none;
        std::size_t users = 0;
        bool gathering = false;
        std::uint64_t released = 0;  ///< number of releases at that time
    };

    UnitValues() = default;
    /// `unit_of(b)`: the unit of bucket b, below `units`. Units from `first_staying` on get slots of their own. The
    /// slots of the others are large enough for any of them. No unit has a slot yet. Throws as `value_dtype` does.
    template <class UnitOf>
    UnitValues(const BucketPlan& plan, const BucketLayout& layout, std::span<const ParameterView> parameters,
               const char* who, int rank, std::size_t units, std::size_t first_staying, UnitOf&& unit_of)
        : units_(units), first_staying_(first_staying), places_(parameters.size()) {
        for (std::size_t b = 0; b < plan.size(); ++b) {
            buckets_.push_back(
                typed_view(nullptr, layout.counts[b], value_dtype(plan, b, parameters, who, rank), B::memory_space));
            for (std::size_t i : plan.bucket(b)) places_[i] = {b, layout.offsets[i], parameters[i].gradient.count};
            const std::size_t u = unit_of(b);
            units_[u].buckets.push_back(b);
            units_[u].bytes += in_lines(buckets_[b].bytes());
            if (u < first_staying) slot_bytes_ = larger(slot_bytes_, units_[u].bytes);
        }
    }

    /// Uses the trainer's memory for buckets whose values lie there alone and in the order of the gradients, on all
    /// ranks. Call it before `place`. Collective.
    void borrow(B& backend, const BucketPlan& plan, const BucketLayout& layout,
                std::span<const ParameterView> parameters) {
        List<std::uint64_t> fits(plan.size());
        for (std::size_t b = 0; b < plan.size(); ++b) {
            const BufferView range = range_of(plan.bucket(b), [&](std::size_t i) { return parameters[i].value; });
            // In device memory, values of two allocations may be adjacent by chance, and no copy may cross that border.
            const void* const arena = parameters[plan.bucket(b).front()].arena;
            bool by_chance = plan.bucket(b).size() > 1 && arena == nullptr;
            for (const std::size_t i : plan.bucket(b)) by_chance = by_chance || parameters[i].arena != arena;
            bool same = range.data != nullptr && range.count == layout.counts[b];
            if (B::memory_space != MemorySpace::host) same = same && !by_chance;
            for (const std::size_t i : plan.bucket(b))
                same = same &&
                       (parameters[i].value.count == 0 || distance(range, parameters[i].value) == layout.offsets[i]);
            if ((fits[b] = same)) buckets_[b].data = range.data;
        }
        const List<std::uint64_t> all = gather_values(host_of(backend), fits);
        for (std::size_t k = 0; k < all.size(); ++k)
            if (all[k] == 0) buckets_[k % plan.size()].data = nullptr;
        for (Unit& unit : units_)
            unit.buckets.erase_if([&](std::size_t b) {
                const bool borrowed = buckets_[b].data != nullptr;  // it needs no slot
                if (borrowed) unit.bytes -= in_lines(buckets_[b].bytes());
                return borrowed;
            });
    }

    Unit& operator[](std::size_t u) noexcept { return units_[u]; }
    const Unit& operator[](std::size_t u) const noexcept { return units_[u]; }
    std::size_t size() const noexcept { return units_.size(); }
    std::size_t bytes() const noexcept { return bytes_; }  ///< of all slots

    /// The values of each bucket; without memory while the unit has no slot.
    std::span<const BufferView> buckets() const noexcept { return buckets_; }
    BufferView bucket(std::size_t b) const noexcept { return buckets_[b]; }
    /// The bucket of trainable parameter i, and its values.
    std::size_t bucket_of(std::size_t i) const noexcept { return places_[i].bucket; }
    BufferView value(std::size_t i) const noexcept {
        return buckets_[places_[i].bucket].subview(places_[i].offset, places_[i].count);
    }

    /// Gives unit u a slot: a free one, that of the unit released first, or a new one. Units in use keep their slots;
    /// with `keep`, so do released units. Collective.
    void place(B& backend, std::size_t u, bool keep) {
        const auto released = [&](const Slot& slot) { return slot.unit == none ? 0 : 1 + units_[slot.unit].released; };
        std::size_t slot = none;
        for (std::size_t s = 0; s < slots_.size(); ++s) {
            const std::size_t holder = slots_[s].unit;
            if (slots_[s].bytes < units_[u].bytes) continue;
            if (holder != none && (keep || units_[holder].users != 0 || units_[holder].gathering)) continue;
            if (slot == none || released(slots_[s]) < released(slots_[slot])) slot = s;
        }
        if (slot == none) {
            slot = slots_.size();
            const std::size_t bytes = u < first_staying_ ? slot_bytes_ : units_[u].bytes;
            slots_.push_back({Shared<Memory>::make(backend.allocate(bytes)), bytes, none});
            bytes_ += bytes;
        }
        if (slots_[slot].unit != none) displace(slots_[slot].unit);
        slots_[slot].unit = u;
        units_[u].slot = slot;
        auto* next = static_cast<std::byte*>(slots_[slot].memory->data());
        for (const std::size_t b : units_[u].buckets) {
            buckets_[b].data = next;
            next += in_lines(buckets_[b].bytes());
        }
    }

    /// Makes all ranks, which must be threads of one process, use the memory of rank 0.
    /// Call it after `place`. Collective.
    [[gnu::cold]] void share(B& backend, const char* who) {
        const std::uint64_t own[] = {process_number(), reinterpret_cast<std::uintptr_t>(this)};
        const List<std::uint64_t> all = gather_values(host_of(backend), own);
        for (std::size_t k = 0; k < all.size(); k += 2)
            if (all[k] != all[0])
                raise(Errc::invalid_argument,
                      text(who, " on rank ", backend.rank(),
                           ": ParameterStorage::shared is for ranks that are threads of one process; use in_buckets"),
                      {.operation = who, .rank = backend.rank()});
        if (backend.rank() != 0) {
            const auto& first = *reinterpret_cast<const UnitValues*>(all[1]);
            slots_ = first.slots_;  // and shares them
            buckets_ = first.buckets_;
            bytes_ = 0;
        }
        backend.barrier().wait();  // only then may rank 0 continue, and be destroyed
    }

    /// Takes unit u's slot away.
    void displace(std::size_t u) noexcept {
        Unit& unit = units_[u];
        if (unit.slot == none) return;
        slots_[unit.slot].unit = none;
        unit.slot = none;
        for (const std::size_t b : unit.buckets) buckets_[b].data = nullptr;
    }

    void release(std::size_t u) noexcept {
        if (units_[u].users != 0 && --units_[u].users == 0) units_[u].released = ++releases_;
    }

private:
    /// The position of a parameter's values.
    struct Place {
        std::size_t bucket = 0, offset = 0, count = 0;
    };
    using Memory = decltype(std::declval<B&>().allocate(std::size_t{}));
    struct Slot {
        Shared<Memory> memory;
        std::size_t bytes;
        std::size_t unit;
    };

    List<Slot> slots_;
    List<Unit> units_;
    std::size_t first_staying_ = 0;
    List<BufferView> buckets_;
    List<Place> places_;  ///< by parameter
    std::size_t slot_bytes_ = 0, bytes_ = 0;
    std::uint64_t releases_ = 0;
};

/// Remembers the order in which a step gathered its units. Predicts the next ones while a step follows the same order.
class GatherOrder {
public:
    /// Predicts `ahead` units.
    explicit GatherOrder(std::size_t ahead) noexcept : ahead_(ahead) {}

    /// Records that unit u is gathered. Returns the units that followed it in the previous step, the next one first.
    std::span<const std::size_t> next(std::size_t u) {
        if (now_.size() < most) now_.push_back(u);
        // After a forward without a backward, such as in validation, the order starts over.
        if (at_ >= before_.size() || before_[at_] != u) at_ = !before_.empty() && before_[0] == u ? 0 : before_.size();
        if (at_ >= before_.size()) return {};
        return predicted(++at_);
    }

    /// Ends the step. Returns the units that the next step should begin with.
    std::span<const std::size_t> end_step() {
        std::swap(before_, now_);
        now_.clear();
        at_ = 0;
        return predicted(0);
    }

private:
    std::span<const std::size_t> predicted(std::size_t from) const noexcept {
        return std::span(before_).subspan(from, smaller(ahead_, before_.size() - from));
    }

    /// Gathers without a step; beyond that it records no more.
    static constexpr std::size_t most = std::size_t{1} << 16;

    std::size_t ahead_;
    List<std::size_t> before_, now_;
    std::size_t at_ = 0;  ///< position in `before_`
};

}  // namespace gradsync::inline v0_2::detail
