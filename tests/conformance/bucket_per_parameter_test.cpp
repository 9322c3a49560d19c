// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/bucket/per_parameter.hpp>

#include "conformance/bucket_policy.hpp"

TEST_CASE("PerParameter is a bucket policy") { gradsync_test::check_bucket_policy(gradsync::PerParameter{}, {.spares_copies = true}); }
