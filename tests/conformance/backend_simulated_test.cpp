// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
// The threads of a simulation take turns.
#include <gradsync/planning/simulated_backend.hpp>

#include "conformance/backend.hpp"

namespace {

struct Simulated {
    using Backend = gradsync::SimulatedBackend;
    using Memory = gradsync_test::HostMemory;
    static constexpr int largest = 4;
    static constexpr bool one_order = true;
    static constexpr bool tests_have_a_limit = false;

    static bool here(int) { return true; }

    template <class F>
    static void run(int size, std::chrono::nanoseconds limit, F&& f) {
        gradsync::run_simulated({.cluster = {.ranks = size, .between = {1e-5, 1e-9}}, .timeout = limit}, f);
    }
};

}  // namespace

TEST_CASE("SimulatedBackend gives the results of the oracle") { gradsync_test::check_results<Simulated>(); }
TEST_CASE("SimulatedBackend keeps collectives in flight") { gradsync_test::check_in_flight<Simulated>(); }
TEST_CASE("SimulatedBackend splits into groups") { gradsync_test::check_groups<Simulated>(); }
TEST_CASE("SimulatedBackend reports failures on every rank") { gradsync_test::check_failures<Simulated>(); }
TEST_CASE("SimulatedBackend has the abilities that it states") { gradsync_test::check_abilities<Simulated>(); }
