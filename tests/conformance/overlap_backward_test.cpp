// SPDX-License-Identifier: BSL-1.0
#include <gradsync/overlap/overlap_backward.hpp>

#include "conformance/overlap_policy.hpp"

TEST_CASE("OverlapBackward is an overlap policy") { gradsync_test::check_overlap_policy<gradsync::OverlapBackward>(); }

TEST_CASE("OverlapBackward with a thread of its own is an overlap policy") {
    using gradsync::OverlapBackward;
    gradsync_test::check_overlap_policy<OverlapBackward>([] { return OverlapBackward(gradsync::Progress::thread); });
}
