// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>

#include "../bootstrap/rendezvous.hpp"
#include "../core/list.hpp"
#include "../core/math.hpp"
#include "../core/sum_tree.hpp"
#include "engine.hpp"
#include "process.hpp"

namespace gradsync::inline v0_2::detail {

/// Which ranks of a communicator run on which machine.
class Machines {
public:
    /// `of_ranks`: by rank, the number of its machine.
    explicit Machines(List<int> of_ranks = {}) : of_ranks_(std::move(of_ranks)), fewest_(size()) {
        for (int r = 0; r < size(); ++r) {
            const auto ranks = static_cast<int>(std::count(of_ranks_.begin(), of_ranks_.end(), of(r)));
            count_ += local_rank(r) == 0;
            fewest_ = std::min(fewest_, ranks);
            most_ = std::max(most_, ranks);
        }
    }

    /// The number of ranks, and that of machines.
    int size() const noexcept { return static_cast<int>(of_ranks_.size()); }
    int count() const noexcept { return count_; }
    /// The number of ranks on the machine with the fewest, and on that with the most.
    int fewest() const noexcept { return fewest_; }
    int most() const noexcept { return most_; }

    int of(int rank) const noexcept { return of_ranks_[static_cast<std::size_t>(rank)]; }
    /// Place of a rank among those of its machine.
    int local_rank(int rank) const noexcept { return static_cast<int>(std::count(of_ranks_.begin(), of_ranks_.begin() + rank, of(rank))); }

    /// The machines of a group's members.
    Machines of(const collective::Group& group) const {
        List<int> machines;
        for (const int member : group.members) machines.push_back(of(member));
        return Machines(std::move(machines));
    }
    /// Cuts each machine, if there are several, into teams: ranks that can add up for themselves, because they are the leaves of a node of the
    /// tree of sums (core/sum_tree.hpp). The first rank of a team is its number.
    Machines teams() const {
        List<int> teams(of_ranks_.size());
        if (count_ > 1) cut(0, of_ranks_.size(), teams);
        return Machines(std::move(teams));
    }
    /// For teams: those of a group's members.
    Machines teams_of(const collective::Group& group) const { return of(group).teams(); }
    /// The members of a group that are in the same one of its `teams` as `group.rank`, by their local ranks here.
    collective::Group here(const collective::Group& group, const Machines& teams) const {
        collective::Group here{.split = group.split, .color = group.color, .rank = teams.local_rank(group.rank)};
        for (int g = 0; g < teams.size(); ++g)
            if (teams.of(g) == teams.of(group.rank)) here.members.push_back(local_rank(group.members[static_cast<std::size_t>(g)]));
        return here;
    }
    /// The numbers of ranks on the machines, in the order of their numbers.
    List<std::size_t> counts() const {
        List<std::size_t> counts;
        for (int r = 0; r < size(); ++r)
            if (local_rank(r) == 0) counts.push_back(static_cast<std::size_t>(std::count(of_ranks_.begin(), of_ranks_.end(), of(r))));
        return counts;
    }
    /// The ranks that have the same place on their machines as `rank`, in the machines' order.
    collective::Group counterparts(int rank) const {
        collective::Group group;
        for (int r = 0; r < size(); ++r)
            if (local_rank(r) == local_rank(rank)) group.members.push_back(r);
        std::sort(group.members.begin(), group.members.end(), [&](int a, int b) { return of(a) < of(b); });
        group.rank = static_cast<int>(std::find(group.members.begin(), group.members.end(), rank) - group.members.begin());
        return group;
    }

private:
    void cut(std::size_t first, std::size_t last, List<int>& teams) const {
        const auto begin = of_ranks_.begin() + first, end = of_ranks_.begin() + last;
        if (std::count(begin, end, *begin) == end - begin)
            return std::fill(teams.begin() + first, teams.begin() + last, static_cast<int>(first));
        const std::size_t half = std::bit_ceil(last - first) / 2;
        cut(first, first + half, teams);
        cut(first + half, last, teams);
    }

    List<int> of_ranks_;
    int count_ = 0, fewest_, most_ = 0;
};

/// The machines of the ranks that meet at a rendezvous. Processes are on one machine if they have the same host name and see one another.
struct Placement {
    /// `domain`: only ranks with the same number count as being on one machine. Collective.
    template <Rendezvous R>
    Placement(R& meeting, int domain) : rank(meeting.rank()), size(meeting.size()) {
        struct Place {
            collective::ProcessIdentity process;
            std::uint64_t host = 0;
            std::int64_t domain = 0;
        };
        const auto places = bootstrap::exchange(meeting, Place{collective::ProcessIdentity::own(), host_of_this_process(), domain});
        List<int> of_ranks;  // the first rank on its machine names the machine
        for (int r = 0; r < size; ++r) {
            const Place& place = places[static_cast<std::size_t>(r)];
            one_machine &= place.host == places[0].host && place.process.machine == places[0].process.machine;
            // Shared memory is opened through process numbers, so both processes must see the same numbers.
            const auto first = std::find_if(places.begin(), places.end(), [&](const Place& p) {
                return p.host == place.host && p.process.system == place.process.system && p.domain == place.domain;
            });
            of_ranks.push_back(static_cast<int>(first - places.begin()));
            processes.push_back(place.process);
        }
        machines = Machines(std::move(of_ranks));
        teams = machines.teams();
        for (int r = 0; r < size; ++r) {
            if (machines.of(r) == machines.of(rank)) ++size_here;
            if (teams.of(r) == teams.of(rank)) team.push_back(r);
        }
    }

    List<int> all() const { return collective::Group::of_all(size, rank).members; }

    int rank, size;
    List<collective::ProcessIdentity> processes;  ///< by rank
    Machines machines, teams;
    int size_here = 0;        ///< number of ranks on this machine
    List<int> team;           ///< the ranks of this one's team, which share memory
    bool one_machine = true;  ///< all ranks run on one machine, regardless of their domains

private:
    static std::uint64_t host_of_this_process() noexcept {
        char name[256] = {};
        if (::gethostname(name, sizeof name - 1) != 0) name[0] = '\0';
        return fnv1a(name, std::strlen(name));
    }
};

}  // namespace gradsync::inline v0_2::detail
