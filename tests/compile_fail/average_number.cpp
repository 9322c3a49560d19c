// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: pass a variable that is not const: the result replaces this number
// expect 2: gradsync: pass a variable that is not const: the result replaces this number
// expect 3: gradsync: copy this number into a double or an integer of 4 or 8 bytes
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
#else
    gradsync::average(comm, loss);
    gradsync::sum(comm, n);
    gradsync::broadcast(comm, loss, n);
#endif
}
