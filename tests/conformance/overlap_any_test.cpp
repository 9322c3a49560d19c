// SPDX-License-Identifier: BSL-1.0
#include <gradsync/overlap/any_overlap.hpp>

#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/overlap/overlap_backward.hpp>

#include "conformance/overlap_policy.hpp"

using gradsync::AnyOverlap;

TEST_CASE("AnyOverlap is an overlap policy") {
    gradsync_test::check_overlap_policy<AnyOverlap>([]() -> AnyOverlap { return gradsync::NoOverlap{}; });
    gradsync_test::check_overlap_policy<AnyOverlap>([]() -> AnyOverlap { return gradsync::OverlapBackward{gradsync::Progress::thread}; });
}
