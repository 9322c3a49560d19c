// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#if defined(__unix__)
#include <unistd.h>
#endif

#include "../bootstrap/rendezvous.hpp"
#include "../core/math.hpp"
#include "process.hpp"

namespace gradsync::inline v0_2::detail {

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
        for (int r = 0; r < size; ++r) {
            const Place& place = places[static_cast<std::size_t>(r)];
            one_machine &= place.host == places[0].host && place.process.machine == places[0].process.machine;
            // Shared memory is opened through process numbers, so both processes must see the same numbers.
            const auto first = std::find_if(places.begin(), places.end(), [&](const Place& p) {
                return p.host == place.host && p.process.system == place.process.system && p.domain == place.domain;
            });
            machines.push_back(static_cast<int>(first - places.begin()));
            machine_count += machines.back() == r;
            processes.push_back(place.process);
        }
        for (int r = 0; r < size; ++r) {
            if (machines[static_cast<std::size_t>(r)] != machines[static_cast<std::size_t>(rank)]) continue;
            if (r == rank) rank_here = static_cast<int>(neighbours.size());
            neighbours.push_back(r);
        }
    }

    int size_here() const noexcept { return static_cast<int>(neighbours.size()); }

    std::vector<int> all() const {
        std::vector<int> numbers(static_cast<std::size_t>(size));
        std::iota(numbers.begin(), numbers.end(), 0);
        return numbers;
    }

    int rank, size;
    int rank_here = 0;
    std::vector<collective::ProcessIdentity> processes;  ///< by rank
    std::vector<int> machines;                           ///< by rank: the first rank on its machine, which names the machine
    std::vector<int> neighbours;                         ///< the ranks on this machine
    int machine_count = 0;
    bool one_machine = true;  ///< all ranks run on one machine, regardless of their domains

private:
    static std::uint64_t host_of_this_process() noexcept {
        char name[256] = {};
#if defined(__unix__)
        if (::gethostname(name, sizeof name - 1) != 0) name[0] = '\0';
#endif
        std::size_t length = 0;
        while (name[length] != '\0') ++length;
        return fnv1a(name, length);
    }
};

}  // namespace gradsync::inline v0_2::detail
