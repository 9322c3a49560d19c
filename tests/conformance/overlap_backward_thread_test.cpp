// SPDX-License-Identifier: BSL-1.0
#include <gradsync/overlap/overlap_backward_thread.hpp>

#include "conformance/overlap_policy.hpp"

TEST_CASE("OverlapBackwardThread is an overlap policy") { gradsync_test::check_overlap_policy<gradsync::OverlapBackwardThread>(); }
