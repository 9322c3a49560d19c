// SPDX-License-Identifier: BSL-1.0
// What must not be dropped. Without -Werror it is a warning.
// flags: -Werror=unused-result
// expect 1: (ignoring return(ed)? value of)
// expect 2: (ignoring return(ed)? value of)
// expect 3: (ignoring return(ed)? value of)
// expect 4: (ignoring return(ed)? value of)
// errors: 1
#include <vector>

#include <gradsync/gradsync.hpp>

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

using namespace gradsync;

void f(ThreadBackend comm, std::vector<float>& values, Reducer<ThreadBackend>& sync) {
#if GRADSYNC_EXPECT_FAILURE == 1
    comm.all_reduce(values, ReduceOp::sum);  // the destructor of the Work would end every rank
#elif GRADSYNC_EXPECT_FAILURE == 2
    sync.no_sync();  // over at once
#elif GRADSYNC_EXPECT_FAILURE == 3
    sync.try_finish();
#elif GRADSYNC_EXPECT_FAILURE == 4
    sync.rebuild_buckets();
#else
    auto work = comm.all_reduce(values, ReduceOp::sum);
    const auto guard = sync.no_sync();
    if (sync.begin_step(false) && sync.try_finish() && sync.rebuild_buckets()) work.wait();
#endif
}
