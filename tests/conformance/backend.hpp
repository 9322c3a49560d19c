// SPDX-License-Identifier: BSL-1.0
#pragma once

/// What every backend promises (the concept `gradsync::Backend`), at 1 to 4 ranks, against a plain sequential oracle.
/// A new backend needs one small file: a launcher (see backend/launcher.hpp), and a test case for each part:
///
///     TEST_CASE("MyBackend gives the results of the oracle") { gradsync_test::check_results<MyLauncher>(); }
///     TEST_CASE("MyBackend keeps collectives in flight") { gradsync_test::check_in_flight<MyLauncher>(); }
///     TEST_CASE("MyBackend splits into groups") { gradsync_test::check_groups<MyLauncher>(); }
///     TEST_CASE("MyBackend reports failures on every rank") { gradsync_test::check_failures<MyLauncher>(); }
///     TEST_CASE("MyBackend has the abilities that it states") { gradsync_test::check_abilities<MyLauncher>(); }
///
/// If its ranks are processes, add `check_killed` (backend/killed.hpp), and `check_lost` for a transport of its own, as in
/// backend_tcp_test.cpp.

#include "backend/abilities.hpp"
#include "backend/failures.hpp"
#include "backend/groups.hpp"
#include "backend/in_flight.hpp"
#include "backend/results.hpp"
