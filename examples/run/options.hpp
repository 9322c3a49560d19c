// SPDX-License-Identifier: BSL-1.0
#pragma once
// The options of gradsync_run.

#include <cstdint>
#include <filesystem>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

namespace gradsync_run {

struct Options {
    std::vector<int> ranks_on{1};  // by host; one number: the same on each
    int ranks = 1;                 // on this host
    int hosts = 1, host_index = 0;
    std::string store, address;
    double wait = 300;  // seconds for other hosts
    std::filesystem::path state;
    double state_every = 60;  // seconds
    unsigned restarts = 0;
    int min_ranks = 0;  // with which the others go on without lost ranks; 0: with all only
    int spares = 0;     // processes that wait to take the place of lost ranks
    double grace = 30;  // seconds that the other ranks get to end by themselves
    bool bind_cores = false;
    bool prefix = true;
    std::filesystem::path log_dir;
    std::vector<std::string> command;

    /// Do ranks of several hosts come and go, each host's by itself?
    bool is_elastic_on_hosts() const { return hosts > 1 && min_ranks != 0; }
    /// On all hosts.
    int all_ranks() const { return std::accumulate(ranks_on.begin(), ranks_on.end(), 0); }
    int all_processes() const { return all_ranks() + hosts * spares; }
    /// The number of this host's process r: ranks come first, host by host, and then the spare processes.
    int number_of(int r) const {
        if (r >= ranks) return all_ranks() + host_index * spares + r - ranks;
        return std::accumulate(ranks_on.begin(), ranks_on.begin() + host_index, r);
    }
    std::optional<int> process_of(std::int64_t number) const {
        for (int r = 0; r < ranks + spares; ++r)
            if (number_of(r) == number) return r;
        return std::nullopt;
    }
};

}  // namespace gradsync_run
