// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: give this overlap policy a member void gradients_ready\(gradsync::BucketLauncher&\)
// expect 2: gradsync: give this overlap policy a member void bucket_full\(gradsync::BucketLauncher&\)
// expect 3: gradsync: give this overlap policy a member void detach\(\)
// expect 4: gradsync: give this overlap policy a member std::string describe\(\) const
// expect 5: gradsync: make this overlap policy copyable
// errors: 1
#include <atomic>

#include <gradsync/core/requirements.hpp>

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

struct MyEngine {};

struct Eager {
    void attach(gradsync::BucketLauncher&) {}
#if GRADSYNC_EXPECT_FAILURE == 2
    void bucket_full(MyEngine&) {}
#else
    void bucket_full(gradsync::BucketLauncher& engine) { engine.launch_full_buckets(); }
#endif
#if GRADSYNC_EXPECT_FAILURE != 1
    void gradients_ready(gradsync::BucketLauncher& engine) { engine.poll(); }
#endif
#if GRADSYNC_EXPECT_FAILURE == 3
    void detached() {}
#else
    void detach() {}
#endif
#if GRADSYNC_EXPECT_FAILURE == 4
    std::string describe() { return "Eager"; }  // not const
#else
    std::string describe() const { return "Eager"; }
#endif
#if GRADSYNC_EXPECT_FAILURE == 5
    std::atomic<int> launches{0};
#else
    int launches = 0;
#endif
};

static_assert(gradsync::require_overlap_policy<Eager>());
