// SPDX-License-Identifier: BSL-1.0
#pragma once
// The options of gradsync_run.

#include <filesystem>
#include <string>
#include <vector>

namespace gradsync_run {

struct Options {
    int ranks = 1;  // on this host
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
};

}  // namespace gradsync_run
