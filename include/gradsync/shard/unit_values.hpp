// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "../core/backend.hpp"
#include "../core/buffer_view.hpp"
#include "../engine/bucket_layout.hpp"

namespace gradsync::inline v0_2::detail {

/// Memory slots for the values of gathered units, one unit per slot. A released unit stays until its slot is needed for another, so that it
/// need not be gathered again if it is used soon. All ranks make the same calls.
template <Backend B>
class UnitValues {
public:
    /// The values of one bucket, as a part of its unit's memory.
    struct Part {
        std::size_t bucket;
        std::size_t offset;  ///< bytes from the start of the unit
        BufferView values;   ///< without memory while the unit has no slot
    };
    struct Unit {
        std::vector<Part> parts;
        std::size_t bytes = 0;
        bool stays = false;  ///< has a slot of its own, and is never released
        std::size_t slot = none;
        std::size_t users = 0;
        bool gathering = false;
        std::uint64_t released = 0;  ///< number of releases by then
    };
    static constexpr std::size_t none = static_cast<std::size_t>(-1);

    UnitValues() = default;
    explicit UnitValues(std::size_t units) : units_(units) {}

    Unit& operator[](std::size_t u) noexcept { return units_[u]; }
    const Unit& operator[](std::size_t u) const noexcept { return units_[u]; }
    std::size_t size() const noexcept { return units_.size(); }
    std::size_t bytes() const noexcept { return bytes_; }  ///< of all slots

    /// Adds bucket b, whose `values` have no memory yet, to unit u. Slots grow to fit the unit, unless `stays` gives it one of its own.
    /// Call it before any unit is placed.
    void add(std::size_t u, std::size_t b, BufferView values, bool stays) {
        Unit& unit = units_[u];
        unit.parts.push_back({b, unit.bytes, values});
        unit.bytes += in_lines(values.bytes());
        unit.stays = stays;
        if (!stays && slot_bytes_ < unit.bytes) slot_bytes_ = unit.bytes;
    }

    /// Gives unit u a slot: a free one, that of the unit released first, or a new one. Units in use keep their slots, and with `keep`
    /// released units do too. Collective.
    void place(B& backend, std::size_t u, bool keep) {
        std::size_t slot = none;
        for (std::size_t s = 0; s < slots_.size(); ++s) {
            if (slots_[s].bytes < units_[u].bytes) continue;
            const std::size_t owner = slots_[s].unit;
            if (owner == none) {
                slot = s;
                break;
            }
            const Unit& held = units_[owner];
            if (keep || held.users != 0 || held.gathering) continue;
            if (slot == none || held.released < units_[slots_[slot].unit].released) slot = s;
        }
        if (slot == none) {
            slot = slots_.size();
            const std::size_t bytes = units_[u].stays ? units_[u].bytes : slot_bytes_;
            slots_.push_back({backend.allocate(bytes), bytes, none});
            bytes_ += bytes;
        }
        if (slots_[slot].unit != none) displace(slots_[slot].unit);
        slots_[slot].unit = u;
        units_[u].slot = slot;
        for (Part& part : units_[u].parts) part.values.data = static_cast<std::byte*>(slots_[slot].memory.data()) + part.offset;
    }

    /// Takes unit u's slot away.
    void displace(std::size_t u) noexcept {
        Unit& unit = units_[u];
        if (unit.slot == none) return;
        slots_[unit.slot].unit = none;
        unit.slot = none;
        for (Part& part : unit.parts) part.values.data = nullptr;
    }

    void release(std::size_t u) noexcept {
        if (units_[u].users != 0 && --units_[u].users == 0) units_[u].released = ++releases_;
    }

private:
    struct Slot {
        decltype(std::declval<B&>().allocate(std::size_t{})) memory;
        std::size_t bytes;
        std::size_t unit;
    };

    std::vector<Slot> slots_;
    std::vector<Unit> units_;
    std::size_t slot_bytes_ = 0;
    std::size_t bytes_ = 0;
    std::uint64_t releases_ = 0;
};

}  // namespace gradsync::inline v0_2::detail
