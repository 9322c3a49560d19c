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
/// counts.
///
///     job                   the job's secret
///     join/MEMBER           a process that waits to become a member
///     gen/NUMBER            the members of a generation
///     back/NUMBER-MEMBER    a member that has left a generation, and waits for the next one
///     out/MEMBER            a member that did not answer in time; its launcher must end it
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

[[gnu::cold]] inline bool are_same(const List<Member>& one, const List<Member>& other) noexcept {
    bool same = one.size() == other.size();
    for (std::size_t i = 0; same && i < one.size(); ++i) same = one[i] == other[i];
    return same;
}

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
    return name_of(gradsync::detail::text("keep/", rank, "-"), member);
}
[[gnu::cold]] inline std::string name_of_memory(int rank) { return gradsync::detail::text("held/", rank); }
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

/// What a process knows.
struct View {
    std::uint64_t self = 0;     ///< as which it has joined
    std::uint32_t left = 0;     ///< the last generation that it has met and left
    Generation newest = {};     ///< without members that are certainly dead
    std::size_t was = 0;        ///< number of members of `newest`, with the dead ones
    List<Member> waiting = {};  ///< those that no generation has listed, and that may be alive
    bool ended = false;         ///< the job has
    std::size_t ranks = 1;      ///< that the job needs
};

/// What it does next: nothing until it knows more, meet the members of the newest generation, propose another one, or
/// leave.
enum class Step { wait, meet, propose, leave };

struct Decision {
    Step step = Step::wait;
    List<Member> members = {};  ///< those to propose
};

[[gnu::cold]] inline void sort_by_place(List<Member>& members) {
    gradsync::detail::sort_by(members, [](const Member& one, const Member& other) {
        return one.place != other.place ? one.place < other.place : one.id < other.id;
    });
}

[[gnu::cold]] inline Decision decide(const View& view) {
    if (view.ended) return {Step::leave};
    const bool is_member = view.newest.rank_of(view.self) >= 0;
    const bool has_left = view.left >= view.newest.number;
    const bool is_whole = view.newest.members.size() == view.was;
    if (is_member && !has_left && is_whole) return {Step::meet};
    // Members that are alive propose, as they learn of the failure.
    if (!is_member && !view.newest.members.empty()) return {Step::wait};
    List<Member> members = view.newest.members, waiting = view.waiting;
    sort_by_place(waiting);
    for (const Member& one : waiting)
        if (members.size() < view.ranks) members.push_back(one);
    if (members.size() < view.ranks) return {Step::wait};
    sort_by_place(members);
    return {Step::propose, std::move(members)};
}

}  // namespace gradsync::inline v0_2::elastic
