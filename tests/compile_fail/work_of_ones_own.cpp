// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: give the backend's WorkType a member bool test\(\)
// expect 2: gradsync: give the backend's WorkType a member void wait\(\)
// expect 3: gradsync: give the backend's WorkType a default constructor
// expect 4: gradsync: make the backend's WorkType movable
// expect 5: gradsync: give the backend's WorkType a member bool test\(\)
// errors: 1
#include <gradsync/core/requirements.hpp>

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

struct Pending {
#if GRADSYNC_EXPECT_FAILURE == 1
    void test();  // it says nothing
#elif GRADSYNC_EXPECT_FAILURE != 5
    bool test();
#endif
#if GRADSYNC_EXPECT_FAILURE == 2
    bool wait();
#else
    void wait();
#endif
#if GRADSYNC_EXPECT_FAILURE == 3
    explicit Pending(int handle);
#endif
#if GRADSYNC_EXPECT_FAILURE == 4
    Pending() = default;
    Pending(const Pending&) = delete;
#endif
};

#if GRADSYNC_EXPECT_FAILURE == 0
static_assert(gradsync::Work<Pending>);
#else
struct Mine {
    using WorkType = Pending;
};
static_assert(gradsync::require_backend<Mine>());
#endif
