// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: this function runs once on each rank, with the rank's communicator: give it one parameter of that type
// expect 2: gradsync: this function runs once on each rank, with the rank's communicator: give it one parameter of that type
// errors: 1
#include <gradsync/backend/thread_backend.hpp>

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

namespace gs = gradsync;

void f() {
#if GRADSYNC_EXPECT_FAILURE == 1
    gs::run_threads(2, [](int rank) { return rank; });
#elif GRADSYNC_EXPECT_FAILURE == 2
    gs::run_threads(2, [](gs::ThreadBackend& comm) { comm.barrier().wait(); });
#else
    gs::run_threads(2, [](gs::ThreadBackend comm) { comm.barrier().wait(); });
    const auto ranks = gs::run_threads(2, [](const gs::ThreadBackend& comm) { return comm.rank(); });
    gs::run_threads(static_cast<int>(ranks.size()), [](auto comm) { comm.barrier().wait(); });
#endif
}
