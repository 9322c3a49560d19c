// SPDX-License-Identifier: BSL-1.0
// ctest: COST 14
#include <gradsync/backend/thread_backend.hpp>

#include "conformance/backend.hpp"

namespace {

struct Threads {
    using Backend = gradsync::ThreadBackend;
    using Memory = gradsync_test::HostMemory;
    static constexpr int largest = 4;
    static constexpr bool one_order = true;

    static bool here(int) { return true; }

    template <class F>
    static void run(int size, std::chrono::nanoseconds limit, F&& f) {
        gradsync::run_threads(size, f, gradsync::ThreadOptions{.timeout = limit});
    }
};

}  // namespace

TEST_CASE("ThreadBackend gives the results of the oracle") { gradsync_test::check_results<Threads>(); }
TEST_CASE("ThreadBackend keeps collectives in flight") { gradsync_test::check_in_flight<Threads>(); }
TEST_CASE("ThreadBackend splits into groups") { gradsync_test::check_groups<Threads>(); }
TEST_CASE("ThreadBackend reports failures on every rank") { gradsync_test::check_failures<Threads>(); }
TEST_CASE("ThreadBackend has the abilities that it states") { gradsync_test::check_abilities<Threads>(); }
