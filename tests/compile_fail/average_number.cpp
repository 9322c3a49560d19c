// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: pass a variable that is not const: the result replaces this number
// expect 2: gradsync: pass a variable that is not const: the result replaces this number
// expect 3: gradsync: copy this number into a double or an integer of 4 or 8 bytes
// expect 4: gradsync: say whether this int is the root: broadcast.comm, gs::Root.root., x. if it is
// expect 5: gradsync: say whether this int is the root
// expect 6: gradsync: pass a variable that is not const: .*the root of a broadcast is a gradsync::Root
// errors: 1
#include <gradsync/gradsync.hpp>

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

void f(gradsync::ThreadBackend comm, double loss, [[maybe_unused]] int n) {
#if GRADSYNC_EXPECT_FAILURE == 1
    const double mine = loss;
    gradsync::average(comm, mine);
#elif GRADSYNC_EXPECT_FAILURE == 2
    gradsync::average(comm, loss / n);
#elif GRADSYNC_EXPECT_FAILURE == 3
    bool correct = loss < 1;
    gradsync::sum(comm, correct);
#elif GRADSYNC_EXPECT_FAILURE == 4
    gradsync::broadcast(comm, n, loss);
#elif GRADSYNC_EXPECT_FAILURE == 5
    gradsync::broadcast(comm, loss, n);
#elif GRADSYNC_EXPECT_FAILURE == 6
    const int root = 0;
    gradsync::broadcast(comm, root, loss);
#else
    gradsync::average(comm, loss);
    gradsync::sum(comm, n);
    gradsync::broadcast(comm, n);
    gradsync::broadcast(comm, gradsync::Root{n}, loss, n);
#endif
}
