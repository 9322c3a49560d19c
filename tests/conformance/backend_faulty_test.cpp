// SPDX-License-Identifier: BSL-1.0
// Where nothing goes wrong it is the backend that it was made of.
#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/planning/faulty_backend.hpp>

#include "conformance/backend.hpp"

namespace {

struct FaultlessThreads {
    using Backend = gradsync::FaultyBackend<gradsync::ThreadBackend>;
    using Memory = gradsync_test::HostMemory;
    static constexpr int largest = 3;
    static constexpr bool one_order = true;

    static bool here(int) { return true; }

    template <class F>
    static void run(int size, std::chrono::nanoseconds limit, F&& f) {
        gradsync::run_threads(
            size, [&](gradsync::ThreadBackend comm) { f(Backend(comm, [](const gradsync::FaultPoint&) {})); },
            gradsync::ThreadOptions{.timeout = limit});
    }
};
static_assert(gradsync::Backend<FaultlessThreads::Backend>);

}  // namespace

TEST_CASE("FaultyBackend gives the results of the oracle") { gradsync_test::check_results<FaultlessThreads>(); }
TEST_CASE("FaultyBackend keeps collectives in flight") { gradsync_test::check_in_flight<FaultlessThreads>(); }
TEST_CASE("FaultyBackend splits into groups") { gradsync_test::check_groups<FaultlessThreads>(); }
TEST_CASE("FaultyBackend reports failures on every rank") { gradsync_test::check_failures<FaultlessThreads>(); }
TEST_CASE("FaultyBackend has the abilities that it states") { gradsync_test::check_abilities<FaultlessThreads>(); }
