// SPDX-License-Identifier: BSL-1.0
// gradsync_train --backend tcp: the ranks are processes that anything may have started, as long as it told each its number, and this is
// one of them.

#include <gradsync/backend/tcp.hpp>
#include <gradsync/gradsync.hpp>

#include "place_in_job.hpp"
#include "run_process.hpp"

namespace gradsync_train {

int main_over_tcp(int argc, char** argv) {
    gs::Job place;
    if (const int code = exit_code_of([&] { place = place_in_job("--backend tcp"); }); code != 0) return code;
    return run_process(
        place.rank, place.size, argc, argv, [&](std::chrono::nanoseconds limit) { return gs::TcpRendezvous(place, {.timeout = limit}); },
        [](gs::TcpRendezvous& ranks, const Options& o) {
            return gs::TcpBackend(ranks, {.timeout = time_limit(o), .shared_memory = !o.no_shared_memory});
        });
}

}  // namespace gradsync_train
