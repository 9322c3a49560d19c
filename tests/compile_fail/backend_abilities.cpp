// SPDX-License-Identifier: BSL-1.0
// expect 1: (no non-static data member named .progres_thread|field designator .progres_thread. does not refer to any field)
// expect 2: gradsync: this backend states the ability progress_thread: give it a member bool wants_progress_thread\(\) const
// expect 3: gradsync: this backend states the ability progress_thread: give it a member bool wants_progress_thread\(\) const
// expect 4: gradsync: this backend has wants_progress_thread\(\), but does not state it: add .progress_thread = true to its abilities
// expect 5: gradsync: this backend has Work::poll\(\), but does not state it: add .poll = true to its abilities
// expect 6: gradsync: this backend has set_tag\(\) or next_owner\(\), but does not state it: add .tags = true to its abilities
// expect 7: gradsync: this backend states the ability clock: give it a member double now\(\) const
// expect 8: gradsync: this backend states the ability groups: give it members group\(\) and std::size_t group_bytes\(\) const
// expect 9: gradsync: this backend states the ability device_passes: give it members passes\(\), stream\(\) and host\(\)
// expect 10: gradsync: this backend states the ability wait_on: give its WorkType a member void wait_on\(stream\)
// expect 11: gradsync: this backend has steps_inside\(\), but does not state it: add .steps_inside = true to its abilities
// expect 12: gradsync: this backend states the ability own_stream: give it a member void use_own_stream\(\), and wait_on
// errors: 1
#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/core/requirements.hpp>

using namespace gradsync;

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

struct Mine : ThreadBackend {
#if GRADSYNC_EXPECT_FAILURE == 0
    static constexpr BackendAbilities abilities{.progress_thread = true, .poll = true, .failed = true, .tags = true, .cheaper_alone = true, .steps_inside = true};
#elif GRADSYNC_EXPECT_FAILURE == 1
    static constexpr BackendAbilities abilities{.progres_thread = true};
#elif GRADSYNC_EXPECT_FAILURE == 2 || GRADSYNC_EXPECT_FAILURE == 3
    static constexpr BackendAbilities abilities{.progress_thread = true, .poll = true, .failed = true, .tags = true, .cheaper_alone = true, .steps_inside = true};
#elif GRADSYNC_EXPECT_FAILURE == 5
    static constexpr BackendAbilities abilities{.failed = true, .tags = true, .cheaper_alone = true, .steps_inside = true};
#elif GRADSYNC_EXPECT_FAILURE == 6
    static constexpr BackendAbilities abilities{.poll = true, .failed = true, .cheaper_alone = true, .steps_inside = true};
    void set_tag(CollectiveTag);
#elif GRADSYNC_EXPECT_FAILURE == 7
    static constexpr BackendAbilities abilities{.poll = true, .failed = true, .tags = true, .cheaper_alone = true, .steps_inside = true, .clock = true};
    const char* now() const;
#elif GRADSYNC_EXPECT_FAILURE == 8
    static constexpr BackendAbilities abilities{.poll = true, .failed = true, .tags = true, .cheaper_alone = true, .steps_inside = true, .groups = true};
    std::size_t group_bytes() const;
#elif GRADSYNC_EXPECT_FAILURE == 9
    static constexpr BackendAbilities abilities{.poll = true, .failed = true, .tags = true, .cheaper_alone = true, .steps_inside = true, .device_passes = true};
    int passes();
#elif GRADSYNC_EXPECT_FAILURE == 10
    static constexpr BackendAbilities abilities{.poll = true, .wait_on = true, .failed = true, .tags = true, .cheaper_alone = true, .steps_inside = true};
    int stream();
#elif GRADSYNC_EXPECT_FAILURE == 11
    static constexpr BackendAbilities abilities{.poll = true, .failed = true, .tags = true, .cheaper_alone = true};
#elif GRADSYNC_EXPECT_FAILURE == 12
    static constexpr BackendAbilities abilities{.poll = true, .own_stream = true, .failed = true, .tags = true, .cheaper_alone = true, .steps_inside = true};
    void use_own_stream();
#endif
#if GRADSYNC_EXPECT_FAILURE == 0 || GRADSYNC_EXPECT_FAILURE == 4
    bool wants_progress_thread() const;
#elif GRADSYNC_EXPECT_FAILURE == 3
    bool wants_progress_thread(int) const;
#endif
    Mine split(int, int);
    Mine duplicate();
};

#if GRADSYNC_EXPECT_FAILURE != 1
static_assert(require_backend<Mine>());
#endif
