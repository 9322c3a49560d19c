// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/bucket/flat.hpp>

#include "conformance/bucket_policy.hpp"

TEST_CASE("Flat is a bucket policy") { gradsync_test::check_bucket_policy(gradsync::Flat{}); }
