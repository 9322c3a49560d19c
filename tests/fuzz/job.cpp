// SPDX-License-Identifier: BSL-1.0
// The environment of a launcher: lines NAME=VALUE.
#include <map>

#include <gradsync/bootstrap/job.hpp>

#include "fuzz.hpp"

static const gradsync_fuzz::Target target("job", [](gradsync_fuzz::Input input) {
    std::map<std::string, std::string> variables;
    const std::string all = input.text();
    for (std::size_t at = 0; at < all.size();) {
        const std::string line = all.substr(at, all.find('\n', at) - at);
        at += line.size() + 1;
        const std::size_t equals = std::min(line.find('='), line.size());
        variables[line.substr(0, equals)] = line.substr(std::min(equals + 1, line.size()));
        (void)gradsync::bootstrap::first_host(line);
    }
    const auto job = gradsync::Job::from([&](const char* name) {
        const auto found = variables.find(name);
        return found == variables.end() ? nullptr : found->second.c_str();
    });
    gradsync_fuzz::check(job.rank >= 0 && job.rank < job.size && job.local_rank >= 0 && job.local_rank < job.size, "ranks out of range");
    gradsync_fuzz::check(!job.address.empty() && job.port != 0, "no address");
});
