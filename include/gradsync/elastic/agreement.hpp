// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/list.hpp"
#include "../core/math.hpp"

/// @file
/// Internal: which state of the training the members of a generation go on from, as a function of what they have. This
/// file has no clock, socket or store, so a simulation can run the same code.

namespace gradsync::inline v0_2::elastic {

/// Whole states of the training, after `number - 1` steps, or some of the parts into which one is divided. A state that
/// all ranks have has one part, number 0.
struct Holding {
    static constexpr std::size_t most = 3;  ///< parts in one place
    static constexpr std::uint32_t none = ~0u;

    std::uint64_t number = 0;    ///< 0: nothing that is whole
    std::uint64_t division = 0;  ///< how the state is divided: a hash
    std::uint32_t parts = 1;     ///< of the whole state
    std::uint32_t part[most] = {0, none, none};

    bool is_of(const Holding& other) const noexcept {
        return number == other.number && division == other.division && parts == other.parts;
    }
};

/// The states of one member, as it tells the others. Plain bytes.
struct Row {
    static constexpr int memory = 0;  ///< the place of a replicated state in which the training computes
    static constexpr int most = 5;    ///< two in turns; more while changes are interrupted again and again
    Holding holdings[most] = {};
    std::uint64_t top = 0;  ///< the newest state that some member is known to have had
};

/// The state that all members go on from.
struct Plan {
    Holding base = {};                ///< number 0: nobody has one
    std::uint64_t lost = 0;           ///< steps after it that were done, and are done again
    List<std::uint32_t> owners = {};  ///< for each of its parts, the rank that has it
};

/// Returns for each part of a state the lowest rank that has it; nothing if a part is missing.
[[gnu::cold]] inline List<std::uint32_t> owners_of(const List<Row>& rows, const Holding& state) {
    List<std::uint32_t> owners(state.parts, Holding::none);
    std::uint32_t found = 0;
    for (std::size_t r = 0; r < rows.size(); ++r)
        for (const Holding& one : rows[r].holdings)
            for (const std::uint32_t part : one.part)
                if (one.is_of(state) && part < state.parts && owners[part] == Holding::none) {
                    owners[part] = static_cast<std::uint32_t>(r);
                    ++found;
                }
    if (found != state.parts) owners.clear();
    return owners;
}

/// The newest state of which every part is there. The same on all members, as they have the same table.
[[gnu::cold]] inline Plan agree(const List<Row>& rows) {
    Plan plan;
    std::uint64_t top = 0;
    for (const Row& row : rows) {
        top = detail::larger(top, row.top);
        for (const Holding& one : row.holdings) {
            if (one.number <= plan.base.number || one.parts == 0 || one.parts > (1u << 20)) continue;
            if (List<std::uint32_t> owners = owners_of(rows, one); !owners.empty()) {
                plan.base = one;
                plan.owners = std::move(owners);
            }
        }
    }
    if (plan.base.number != 0 && top > plan.base.number) plan.lost = top - plan.base.number;
    return plan;
}

/// Returns the ranks, in ascending order, that keep their parts together: two of them, or three if the number of ranks
/// is odd. `hosts`: of all ranks; ranks of different hosts come together where that is possible. `goes`: which ranks
/// leave, at most half of them; each of these is with one that stays.
[[gnu::cold]] inline List<std::uint32_t> mates_of(std::uint32_t rank, const List<std::uint64_t>& hosts,
                                                  const List<std::uint64_t>& goes) {
    const std::size_t size = hosts.size(), half = size / 2;
    List<std::uint32_t> order, mates;
    for (std::size_t r = 0; r < size; ++r) order.push_back(static_cast<std::uint32_t>(r));
    detail::sort_by(order, [&](std::uint32_t one, std::uint32_t other) {
        if (goes[one] != goes[other]) return goes[one] != 0;
        return hosts[one] != hosts[other] ? hosts[one] < hosts[other] : one < other;
    });
    // The ranks of a host stand side by side, so those half of the order apart have different ones.
    const auto group_of = [&](std::size_t place) { return half == 0 ? 0 : place % half; };
    std::size_t own = 0;
    while (order[own] != rank) ++own;
    for (std::size_t place = 0; place < size; ++place)
        if (group_of(place) == group_of(own)) mates.push_back(order[place]);
    detail::sort_by(mates, [](std::uint32_t one, std::uint32_t other) { return one < other; });
    return mates;
}

/// The states that a process has, in places. The training's memory is torn while a step changes it. The last state that
/// is whole is never overwritten, except by the step itself.
class Holdings {
public:
    explicit Holdings(int places) noexcept : places_(places) {}

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
    void know(std::uint64_t number) noexcept { row_.top = detail::larger(row_.top, number); }
    /// The members go on from the state in this place, and it alone counts: later ones are done again.
    void go_on_from(int place) noexcept {
        row_.top = row_.holdings[place].number;
        for (int i = 0; i < places_; ++i)
            if (i != place) tear(i);
    }

    /// Which place has this state, or some parts of it; -1: none.
    int place_of(const Holding& state) const noexcept {
        for (int i = 0; i < places_; ++i)
            if (row_.holdings[i].is_of(state)) return i;
        return -1;
    }
    /// Which place has this part of a state; -1: none.
    int place_of(const Holding& state, std::uint32_t part) const noexcept {
        for (int i = 0; i < places_; ++i)
            for (const std::uint32_t one : row_.holdings[i].part)
                if (one == part && row_.holdings[i].is_of(state)) return i;
        return -1;
    }
    /// Returns a place for what the members go on from: an empty one, or that of the oldest other state, or of parts of
    /// the same state that nobody reads here. `rank`: of this process. -1: there is no such place.
    int place_for(const Plan& plan, std::uint32_t rank) const noexcept {
        int best = -1;
        std::uint64_t least = ~std::uint64_t{0};
        for (int i = 0; i < places_; ++i) {
            const Holding& here = row_.holdings[i];
            const bool is_base = here.number == plan.base.number && here.number != 0;
            if (is_base && is_read(i, plan, rank)) continue;
            const std::uint64_t worth = is_base ? ~std::uint64_t{0} - !here.is_of(plan.base) - 1 : here.number;
            if (worth < least) best = i, least = worth;
        }
        return best;
    }
    /// Returns a place for the next state, while the one before it stays.
    int place_for_next() const noexcept {
        std::uint64_t newest = 0;
        for (const Holding& one : row_.holdings) newest = detail::larger(newest, one.number);
        int place = 0;
        while (place < places_ && newest != 0 && row_.holdings[place].number == newest) ++place;
        return place < places_ ? place : -1;
    }

private:
    /// Do the members read one of the parts of the plan's state from this place?
    bool is_read(int place, const Plan& plan, std::uint32_t rank) const noexcept {
        bool read = false;
        for (std::uint32_t part = 0; part < plan.owners.size(); ++part)
            read = read || (plan.owners[part] == rank && place_of(plan.base, part) == place);
        return read;
    }

    int places_;
    Row row_;
};

}  // namespace gradsync::inline v0_2::elastic
