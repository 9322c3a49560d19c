// SPDX-License-Identifier: BSL-1.0
// gradsync_train --backend tcp: the ranks are processes that anything may have started, as long as it told each its number, and this is
// one of them.

#include <gradsync/backend/tcp.hpp>
#include <gradsync/gradsync.hpp>

#include "place_in_job.hpp"
#include "run_process.hpp"

namespace gradsync_train {

namespace {

/// How long to wait for the other processes: as the flags say. What is wrong with these all say together, once they have met.
gs::TcpRendezvousOptions meeting_options(int argc, char** argv, int processes) {
    try {
        return {.timeout = time_limit(parse_options(argc, argv, processes))};
    } catch (...) {
        return {};
    }
}

}  // namespace

int main_over_tcp(int argc, char** argv) {
    gs::Job place;
    if (const int code = exit_code_of([&] { place = place_in_job("--backend tcp"); }); code != 0) return code;
    return run_process(
        place.rank, argc, argv, [&] { return gs::TcpRendezvous(place, meeting_options(argc, argv, place.size)); },
        [](gs::TcpRendezvous& ranks, const Options& o) {
            return gs::TcpBackend(ranks, {.timeout = time_limit(o), .shared_memory = !o.no_shared_memory});
        });
}

}  // namespace gradsync_train
