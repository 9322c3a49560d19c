// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../bootstrap/reception.hpp"
#include "../collective/process.hpp"

/// @file
/// Internal: what a process of a changing job does next, as a function of what it knows. This file has no clock, socket
/// or store, so a simulation can run the same code.
///
/// The ranks of a job meet in generations, numbered from 1. A generation is a record in the job's store: its members,
/// by rank. A record never changes. When a rank is lost, the others propose the next generation; the first proposal
/// counts. If the number of ranks may change, they go on without the lost one, and others that wait become members when
/// all agree to it.
///
///     job                   the job's secret
///     join/MEMBER           a process that waits to become a member
///     call/MEMBER           asks a process that waits for an answer, so that nobody counts on one that is stopped
///     here/MEMBER           its answer
///     gen/NUMBER            the members of a generation
///     back/NUMBER-MEMBER    a member that has left a generation, and waits for the next one
///     out/MEMBER            a member that did not answer in time; its launcher must end it
///     leave/MEMBER          a member that wants to leave
///     gone/MEMBER           a process that takes no part any more, and may live on
///     begun/NUMBER          "yes": the generation may have results, so nobody begins anew; "no": it has none
///     keep/RANK-MEMBER      memory that a rank has made for its state
///     held/RANK             the same memory, held by the launcher
///     end                   the job has ended

namespace gradsync::inline v0_2::elastic {

/// A process that belongs to a job, or waits to. Plain bytes, as the store keeps them.
struct Member {
    std::uint64_t id = 0;        ///< random; a process that joins again is another member
    std::int64_t place = 0;      ///< members of a generation are ordered by it
    net::Contact listener = {};  ///< where others reach it as long as it lives
    collective::ProcessIdentity process = {};

    bool operator==(const Member& other) const noexcept { return id == other.id; }
};
static_assert(std::is_trivially_copyable_v<Member>);

/// A generation as a process sees it.
struct Generation {
    std::uint32_t number = 0;   ///< 0: there is none yet
    List<Member> members = {};  ///< by rank

    /// Returns the member's rank, or -1.
    int rank_of(std::uint64_t member) const noexcept {
        for (std::size_t r = 0; r < members.size(); ++r)
            if (members[r].id == member) return static_cast<int>(r);
        return -1;
    }
};

/// The name of a generation in the store; they sort by their numbers.
[[gnu::cold]] inline std::string name_of_generation(std::uint32_t number) {
    const std::string digits = std::to_string(number);
    return "gen/" + std::string(10 - digits.size(), '0') + digits;
}
[[gnu::cold]] inline std::string name_of(std::string prefix, std::uint64_t member) {
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(member));
    return prefix += digits;
}
/// The names of the memory for a rank's state: as it is offered, and as it is held.
[[gnu::cold]] inline std::string name_of_offer(int rank, std::uint64_t member) {
    return name_of(detail::text("keep/", rank, "-"), member);
}
[[gnu::cold]] inline std::string name_of_memory(int rank) { return detail::text("held/", rank); }
/// Returns the prefix of the records of members that have left the generation.
[[gnu::cold]] inline std::string name_of_return(std::uint32_t generation) {
    return "back/" + std::to_string(generation) + "-";
}

/// Returns the members that a record holds; none if the bytes are no record of members.
[[gnu::cold]] inline List<Member> members_in(const Blob& bytes) {
    List<Member> members(bytes.size() % sizeof(Member) == 0 ? bytes.size() / sizeof(Member) : 0);
    if (!members.empty()) std::memcpy(members.data(), bytes.data(), bytes.size());
    return members;
}

/// Numbers of members. A long job has seen many.
class MemberSet {
public:
    [[gnu::cold]] bool contains(std::uint64_t id) const noexcept {
        const std::size_t at = place_of(id);
        return at < ids_.size() && ids_[at] == id;
    }
    [[gnu::cold]] void insert(std::uint64_t id) {
        const std::size_t at = place_of(id);
        if (at < ids_.size() && ids_[at] == id) return;
        ids_.push_back(id);
        for (std::size_t i = ids_.size() - 1; i > at; --i) std::swap(ids_[i], ids_[i - 1]);
    }
    void clear() { ids_.clear(); }

private:
    /// Of the first that is not smaller.
    std::size_t place_of(std::uint64_t id) const noexcept {
        std::size_t first = 0, end = ids_.size();
        while (first < end) {
            const std::size_t middle = first + (end - first) / 2;
            if (ids_[middle] < id) first = middle + 1;
            else end = middle;
        }
        return first;
    }
    List<std::uint64_t> ids_;  ///< in ascending order
};

/// What a process knows.
struct View {
    std::uint64_t self = 0;  ///< as which it has joined
    std::uint32_t left = 0;  ///< the last generation that it has met and left
    bool agreed = false;     ///< it has left the newest generation as all its members agreed to
    Generation newest = {};  ///< without members that are certainly dead, or leave
    std::size_t was = 0;     ///< number of members of `newest`, with those
    MemberSet absent = {};   ///< members of `newest` that this process has missed in a meeting
    MemberSet settled = {};  ///< members of the last generation in which this process, as it has joined, had the state
    MemberSet leaving = {};  ///< members that leave the newest generation, or all if all want to
    List<Member> waiting = {};  ///< those that no generation has listed, and that may be alive
    bool ended = false;         ///< the job has
    std::size_t ranks = 1;      ///< that the job should have
    std::size_t least = 1;      ///< that it needs
    bool changes = false;       ///< the number of ranks may
    bool late = false;          ///< the process has waited as long as it may

    /// Do all members want to leave? Then they stay until they have given the state to others.
    bool is_deserted() const noexcept {
        for (const Member& one : newest.members)
            if (!leaving.contains(one.id)) return false;
        return true;
    }
    /// The members of the newest generation that belong to the next one.
    Generation staying() const {
        Generation next = newest;
        if (!is_deserted()) next.members.erase_if([&](const Member& one) { return leaving.contains(one.id); });
        return next;
    }
    /// Does this process wait for a job that goes on without it? It may have to wait for long.
    bool is_spare() const noexcept { return changes && newest.rank_of(self) < 0 && !newest.members.empty(); }
    /// The most members that the next generation may have.
    std::size_t room() const noexcept { return ranks + (is_deserted() ? newest.members.size() : 0); }
};

/// What it does next: nothing until it knows more, meet the members of the newest generation, propose another one, or
/// leave.
enum class Step { wait, meet, propose, leave };

struct Decision {
    Step step = Step::wait;
    List<Member> members = {};  ///< those to propose
};

[[gnu::cold]] inline void sort_by_place(List<Member>& members) {
    detail::sort_by(members, [](const Member& one, const Member& other) {
        return one.place != other.place ? one.place < other.place : one.id < other.id;
    });
}

/// If two parts of the members cannot reach each other, the larger one goes on. Members that had the state count first,
/// because what newcomers go on from is with those; a newcomer alone does not know them.
[[gnu::cold]] inline bool is_minority(const View& view, const List<Member>& some, const List<Member>& all) {
    const auto weight_of = [&](const List<Member>& members) {
        std::size_t weight = 0;
        for (const Member& one : members) weight += view.settled.contains(one.id) ? all.size() + 1 : 1;
        return weight;
    };
    const std::size_t whole = weight_of(all), twice = 2 * weight_of(some);
    const bool is_newcomer = view.changes && view.newest.number > 1 && whole == all.size();
    if (is_newcomer) return some.size() < all.size();
    return twice < whole || (twice == whole && whole != 0 && !(some[0] == all[0]));
}

[[gnu::cold]] inline Decision decide(const View& view) {
    if (view.ended) return {Step::leave};
    const int rank = view.newest.rank_of(view.self);
    const bool has_left = view.left >= view.newest.number;
    const bool is_whole = view.newest.members.size() == view.was;
    if (rank >= 0 && !has_left && is_whole) return {Step::meet};
    // Members that are alive propose, as they learn of the failure. If they have agreed to change, the first one does,
    // because it has seen why.
    if (rank < 0 && !view.newest.members.empty()) return {Step::wait};
    // Members leave as all have agreed to: after a failure, those that stay may not have the state yet.
    const Generation staying = view.agreed ? view.staying() : view.newest;
    if (rank >= 0 && staying.rank_of(view.self) < 0) return {Step::wait};
    if (view.agreed && staying.rank_of(view.self) > 0 && !view.late) return {Step::wait};
    if (view.absent.contains(view.self) && !view.late) return {Step::wait};  // the others go on without it
    List<Member> members = staying.members, waiting = view.waiting;
    members.erase_if([&](const Member& one) { return one.id != view.self && view.absent.contains(one.id); });
    if (!view.late && is_minority(view, members, staying.members)) return {Step::wait};
    const std::size_t least = members.empty() && !view.late ? view.ranks : view.least;
    sort_by_place(waiting);
    for (const Member& one : waiting)
        if (members.size() < view.room()) members.push_back(one);
    if (members.size() < least) return {Step::wait};
    sort_by_place(members);
    return {Step::propose, std::move(members)};
}

/// A process's part in its job: gathers what it learns, in any order, for `decide`.
class Machine {
public:
    /// The job should have `ranks` ranks, and needs `least`. `changes`: their number may.
    Machine(std::size_t ranks, std::size_t least, bool changes) noexcept
        : all_{.ranks = ranks, .least = least, .changes = changes} {}

    /// Must this process join, because it never has, or because the others have gone on without it?
    bool must_join() const noexcept { return all_.self == 0 || (listed_ && all_.newest.rank_of(all_.self) < 0); }
    void join(const Member& self) {
        all_.self = self.id;
        listed_ = false;
        all_.settled.clear();
    }
    bool knows(std::uint64_t member) const noexcept { return known_.contains(member); }
    /// Learns of a process that waits.
    void see(const Member& waits) {
        if (knows(waits.id)) return;
        known_.insert(waits.id);
        all_.waiting.push_back(waits);
    }
    /// Learns of the generation after `newest()`.
    void see(List<Member> members) {
        all_.newest = {all_.newest.number + 1, std::move(members)};
        all_.agreed = false;
        all_.absent.clear();
        listed_ |= all_.newest.rank_of(all_.self) >= 0;
        all_.waiting.erase_if([&](const Member& one) { return all_.newest.rank_of(one.id) >= 0; });
        for (const Member& one : all_.newest.members) known_.insert(one.id);
    }
    /// Learns that a process which waits has answered.
    void see_ready(std::uint64_t member) { ready_.insert(member); }
    /// Learns that a member wants to leave.
    void see_leaving(std::uint64_t member) { all_.leaving.insert(member); }
    /// Learns that a process takes no part any more.
    void see_gone(std::uint64_t member) { gone_.insert(member); }
    void see_end() noexcept { all_.ended = true; }

    /// Has the state of the newest generation, as all its members do.
    void settle() {
        all_.settled.clear();
        for (const Member& one : all_.newest.members) all_.settled.insert(one.id);
    }
    /// Has left a generation; `agreed`: as all its members agreed to.
    void leave(std::uint32_t generation, bool agreed = false) noexcept {
        all_.left = generation;
        all_.agreed = agreed && generation == all_.newest.number;
    }
    /// A member of the newest generation did not come to a meeting within the time limit. This process itself: another
    /// member cannot reach it.
    void miss(std::uint64_t member) { all_.absent.insert(member); }

    /// `is_dead(member)`: is it certain that it has ended? `late`: has this process waited as long as it may?
    template <class Dead>
    View view(Dead&& is_dead, bool late = false) {
        const auto is_gone = [&](const Member& one) { return is_dead(one) || gone_.contains(one.id); };
        all_.waiting.erase_if(is_gone);
        View known = all_;
        known.was = known.newest.members.size();
        known.leaving = those_that_leave();
        known.late = late;
        known.newest.members.erase_if(is_gone);
        // Members that can go on need not count on a process that may be stopped.
        if (all_.changes && !known.newest.members.empty())
            known.waiting.erase_if([&](const Member& one) { return !ready_.contains(one.id); });
        return known;
    }
    /// May this process leave, as all have agreed to change? Enough others stay, or all want to leave and nobody waits
    /// who could take the state.
    template <class Dead>
    bool may_leave(Dead&& is_dead) {
        const View known = view(is_dead);
        return known.is_deserted() ? all_.waiting.empty() : known.staying().rank_of(all_.self) < 0;
    }
    /// Should the members agree to change? For the first of them.
    template <class Dead>
    bool wants_change(Dead&& is_dead) {
        const View known = view(is_dead);
        const bool somebody_leaves = known.staying().members.size() < known.newest.members.size();
        return somebody_leaves || (!known.waiting.empty() && all_.newest.members.size() < known.room());
    }

    const Generation& newest() const noexcept { return all_.newest; }
    std::uint32_t left() const noexcept { return all_.left; }
    const List<Member>& waiting() const noexcept { return all_.waiting; }
    std::size_t ranks() const noexcept { return all_.ranks; }
    std::size_t least() const noexcept { return all_.least; }
    bool changes() const noexcept { return all_.changes; }

private:
    /// The members that want to leave, in the order of their ranks, but no more than stay: each hands its part of a
    /// sharded state to another one. The same whoever has gone already.
    MemberSet those_that_leave() const {
        std::size_t may_leave = 0;
        for (const Member& one : all_.newest.members) may_leave += !all_.leaving.contains(one.id);
        if (may_leave == 0) return all_.leaving;
        MemberSet leave;
        for (const Member& one : all_.newest.members)
            if (all_.leaving.contains(one.id) && may_leave != 0) leave.insert(one.id), --may_leave;
        return leave;
    }

    View all_;  ///< all that was learnt: with the dead, and with all that want to leave
    MemberSet known_, ready_, gone_;
    bool listed_ = false;  ///< a generation has listed this process
};

}  // namespace gradsync::inline v0_2::elastic
