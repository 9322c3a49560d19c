// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../bootstrap/rendezvous.hpp"
#include "engine.hpp"
#include "process.hpp"

namespace gradsync::inline v0_2::detail {

/// The machine of each rank of a communicator.
class Machines {
public:
    /// `of_ranks`: by rank, the number of its machine.
    [[gnu::cold]] explicit Machines(List<int> of_ranks = {}) : of_ranks_(std::move(of_ranks)), fewest_(size()) {
        for (int r = 0; r < size(); ++r) {
            count_ += local_rank(r) == 0;
            fewest_ = smaller(fewest_, neighbours(r));
            most_ = larger(most_, neighbours(r));
        }
    }

    /// The number of ranks, and of machines.
    int size() const noexcept { return static_cast<int>(of_ranks_.size()); }
    int count() const noexcept { return count_; }
    /// The number of ranks on the machine with the fewest, and on the one with the most.
    int fewest() const noexcept { return fewest_; }
    int most() const noexcept { return most_; }

    int of(int rank) const noexcept { return of_ranks_[rank]; }
    /// The index of a rank among those of its machine.
    int local_rank(int rank) const noexcept {
        int before = 0;
        for (int r = 0; r < rank; ++r) before += of(r) == of(rank);
        return before;
    }

    /// The number of ranks on the machine of `rank`, itself included.
    int neighbours(int rank) const noexcept {
        int ranks = 0;
        for (const int machine : of_ranks_) ranks += machine == of(rank);
        return ranks;
    }

    /// The machines of a group's members.
    [[gnu::cold]] Machines of(const collective::Group& group) const {
        List<int> machines;
        for (const int member : group.members) machines.push_back(of(member));
        return Machines(std::move(machines));
    }
    /// Cuts each machine, if there are several, into teams: ranks that can reduce among themselves, because they are
    /// the leaves of a node of the tree of sums (core/math.hpp). A team's number is its first rank.
    [[gnu::cold]] Machines teams() const {
        List<int> teams(of_ranks_.size());
        if (count_ > 1) cut(0, size(), teams);
        return Machines(std::move(teams));
    }
    /// For teams: the group of the ranks in the team of `rank`.
    [[gnu::cold]] collective::Group neighbourhood(int rank) const {
        collective::Group group{.color = of(rank)};
        for (int r = 0; r < size(); ++r)
            if (of(r) == of(rank)) group.add(r, r == rank);
        return group;
    }
    /// The members of a group that are on the machine of `rank`, ordered by local rank.
    [[gnu::cold]] collective::Group here(const collective::Group& group, int rank) const {
        collective::Group here{.split = group.split, .color = group.color};
        for (const int member : group.members)
            if (of(member) == of(rank)) here.add(local_rank(member), member == rank);
        return here;
    }
    /// For teams: their sizes, in order.
    [[gnu::cold]] List<std::size_t> counts() const {
        List<std::size_t> counts;
        for (int r = 0; r < size(); ++r)
            if (local_rank(r) == 0) counts.push_back(static_cast<std::size_t>(neighbours(r)));
        return counts;
    }
    /// For teams: the ranks with the same index in their team as `rank`, in the order of the teams.
    [[gnu::cold]] collective::Group counterparts(int rank) const {
        collective::Group group;
        for (int r = 0; r < size(); ++r)
            if (local_rank(r) == local_rank(rank)) group.add(r, r == rank);
        return group;
    }

private:
    [[gnu::cold]] void cut(int first, int last, List<int>& teams) const {
        int together = first;
        for (; together < last && of(together) == of(first); ++together) teams[together] = first;
        if (together == last) return;
        const int half = static_cast<int>(left_half(static_cast<std::size_t>(last - first)));
        cut(first, first + half, teams);
        cut(first + half, last, teams);
    }

    List<int> of_ranks_;
    int count_ = 0, fewest_, most_ = 0;
};

/// The machines of the ranks at a rendezvous. Processes are on one machine if they have the same host
/// name and can see one another.
struct Placement {
    /// `domain`: only ranks with the same number count as being on one machine. Collective.
    Placement(bootstrap::AnyRendezvous meeting, int domain);

    int size_here() const noexcept { return static_cast<int>(neighbours.size()); }

    int rank, size;
    List<collective::ProcessIdentity> processes;  ///< by rank
    Machines machines;
    List<int> neighbours;     ///< the ranks on this machine
    bool one_machine = true;  ///< all ranks run on one machine, regardless of their domains
};

#ifdef GRADSYNC_ONCE
GRADSYNC_ONCE Placement::Placement(bootstrap::AnyRendezvous meeting, int domain)
    : rank(meeting.rank()), size(meeting.size()) {
    struct Place {
        collective::ProcessIdentity process;
        std::uint64_t host = 0;
        std::int64_t domain = 0;
    };
    char name[256] = {};
    if (::gethostname(name, sizeof name - 1) != 0) name[0] = '\0';
    const List<Place> places =
        bootstrap::exchange(meeting, Place{collective::ProcessIdentity::own(), fnv1a(name, std::strlen(name)), domain});
    List<int> of_ranks;  // a machine's number is its first rank
    for (const Place& place : places) {
        one_machine &= place.host == places[0].host && place.process.machine == places[0].process.machine;
        // Shared memory is opened through process numbers, so both processes must see the same numbers.
        const auto is_near = [&](const Place& p) {
            return p.host == place.host && p.process.system == place.process.system && p.domain == place.domain;
        };
        int first = 0;
        while (!is_near(places[first])) ++first;
        of_ranks.push_back(first);
        processes.push_back(place.process);
    }
    machines = Machines(std::move(of_ranks));
    neighbours = machines.neighbourhood(rank).members;
}
#endif

}  // namespace gradsync::inline v0_2::detail
