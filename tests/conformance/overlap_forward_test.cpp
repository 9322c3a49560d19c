// SPDX-License-Identifier: BSL-1.0
#include <gradsync/overlap/overlap_forward.hpp>

#include "conformance/overlap_policy.hpp"

TEST_CASE("OverlapForward is an overlap policy") { gradsync_test::check_overlap_policy<gradsync::OverlapForward>(); }
