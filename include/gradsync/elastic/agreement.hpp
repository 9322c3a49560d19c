// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/list.hpp"
#include "../core/math.hpp"

/// @file
/// Internal: which state of the training the members of a generation go on from, as a function of what they have. This
/// file has no clock, socket or store, so a simulation can run the same code.

namespace gradsync::inline v0_2::elastic {

/// A state of the training, after `number - 1` steps, or a part of it. Replicated state is one part.
struct Holding {
    std::uint64_t number = 0;  ///< 0: nothing that is whole
    std::uint32_t part = 0, parts = 1;
};

/// The states of one member, as it tells the others. Plain bytes.
struct Row {
    static constexpr int memory = 0;  ///< the state in which the training computes; the others are copies
    static constexpr int most = 4;
    Holding holdings[most] = {};
    std::uint64_t top = 0;  ///< the newest state that some member is known to have had
};

/// The state that all members go on from.
struct Plan {
    std::uint64_t base = 0;           ///< the state to go on from; 0: nobody has one
    std::uint64_t lost = 0;           ///< steps after it that were done, and are done again
    List<std::uint32_t> owners = {};  ///< for each of its parts, the rank that has it
};

/// Returns for each part of a state the lowest rank that has it; nothing if a part is missing.
[[gnu::cold]] inline List<std::uint32_t> owners_of(const List<Row>& rows, std::uint64_t number, std::uint32_t parts) {
    constexpr std::uint32_t nobody = ~0u;
    List<std::uint32_t> owners(parts, nobody);
    std::uint32_t found = 0;
    for (std::size_t r = 0; r < rows.size(); ++r)
        for (const Holding& one : rows[r].holdings)
            if (one.number == number && one.parts == parts && one.part < parts && owners[one.part] == nobody) {
                owners[one.part] = static_cast<std::uint32_t>(r);
                ++found;
            }
    if (found != parts) owners.clear();
    return owners;
}

/// The newest state of which every part is there. The same on all members, as they have the same table.
[[gnu::cold]] inline Plan agree(const List<Row>& rows) {
    Plan plan;
    std::uint64_t top = 0;
    for (const Row& row : rows) {
        top = gradsync::detail::larger(top, row.top);
        for (const Holding& one : row.holdings) {
            if (one.number <= plan.base || one.parts == 0 || one.parts > (1u << 20)) continue;
            if (List<std::uint32_t> owners = owners_of(rows, one.number, one.parts); !owners.empty()) {
                plan.base = one.number;
                plan.owners = std::move(owners);
            }
        }
    }
    if (plan.base != 0 && top > plan.base) plan.lost = top - plan.base;
    return plan;
}

/// The states that a process has. The training's memory is torn while a step changes it. The last state that is whole
/// is never overwritten, except by the step itself.
class Holdings {
public:
    /// `copies`: places for states beside the training's memory.
    explicit Holdings(int copies) noexcept : places_(1 + copies) {}

    const Row& row() const noexcept { return row_; }
    const Holding& memory() const noexcept { return row_.holdings[Row::memory]; }

    /// The state in this place is about to be overwritten.
    void tear(int place) noexcept { row_.holdings[place] = {}; }
    /// The state in this place is whole.
    void fill(int place, const Holding& state) noexcept {
        row_.holdings[place] = state;
        know(state.number);
    }
    /// Some member has had this state.
    void know(std::uint64_t number) noexcept { row_.top = gradsync::detail::larger(row_.top, number); }
    /// The members go on from a state, and it alone counts: later ones are done again. Beside its own part, which is in
    /// memory, a process keeps at most one other part: else there might be no place for the next one.
    void go_on_from(std::uint64_t base) noexcept {
        row_.top = base;
        bool has_other = false;
        for (Holding& one : row_.holdings) {
            const bool is_own = one.part == memory().part && one.parts == memory().parts;
            if (one.number != base || (!is_own && has_other)) one = {};
            else has_other |= !is_own;
        }
    }

    /// Which place has this state; -1: none.
    int place_of(const Holding& state) const noexcept {
        for (int i = 0; i < places_; ++i)
            if (row_.holdings[i].number == state.number && row_.holdings[i].part == state.part &&
                row_.holdings[i].parts == state.parts)
                return i;
        return -1;
    }
    /// Returns a place for a copy of the state `base`: over neither a part of it nor the newest state here, unless an
    /// earlier place has the same. Parts of `base` that others read elsewhere go last: `owners` are those of the plan,
    /// none if `base` comes from a checkpoint; `rank` is this process. -1: there is no such place.
    int place_for(std::uint64_t base, const List<std::uint32_t>& owners = {}, std::uint32_t rank = 0) const noexcept {
        std::uint64_t newest = 0;
        for (const Holding& one : row_.holdings) newest = gradsync::detail::larger(newest, one.number);
        for (const bool spares_all : {true, false})
            for (int i = 0; i < places_; ++i) {
                const Holding& here = row_.holdings[i];
                const bool is_read = here.parts == owners.size() && owners[here.part] == rank;
                const bool is_needed = here.number == base ? spares_all || is_read : here.number == newest;
                if (here.number == 0 || !is_needed || place_of(here) < i) return i;
            }
        return -1;
    }

private:
    int places_;
    Row row_;
};

}  // namespace gradsync::inline v0_2::elastic
