// SPDX-License-Identifier: BSL-1.0
#include <gradsync/overlap/no_overlap.hpp>

#include "conformance/overlap_policy.hpp"

TEST_CASE("NoOverlap is an overlap policy") { gradsync_test::check_overlap_policy<gradsync::NoOverlap>(); }
