// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/bucket/any_buckets.hpp>

#include <array>
#include <vector>

#include <gradsync/bucket/flat.hpp>
#include <gradsync/bucket/size_capped.hpp>
#include <gradsync/planning/optimal_buckets.hpp>

#include "conformance/bucket_policy.hpp"

using gradsync::AnyBuckets;

TEST_CASE("AnyBuckets is a bucket policy") {
    gradsync_test::check_bucket_policy(AnyBuckets(gradsync::Flat{}));
    gradsync_test::check_bucket_policy(AnyBuckets(gradsync::SizeCappedBuckets{1000, 100}), {.spares_copies = true}, {gradsync::Flat{}});
}

TEST_CASE("AnyBuckets passes every call on to the policy that it holds") {
    AnyBuckets buckets = gradsync::Flat{};
    CHECK(buckets.describe() == gradsync::Flat{}.describe());
    CHECK_FALSE(buckets.plans_by_times());

    buckets = gradsync::OptimalBuckets{{.fixed = 1e-3, .per_byte = 1e-9}};
    CHECK(buckets.plans_by_times());
    const AnyBuckets untold = buckets;
    buckets.set_ready_seconds(std::array{0.1, 0.0});
    const std::vector<gradsync::ParameterInfo> parameters(2, {.count = 100'000});
    const std::vector<std::size_t> order{1, 0};
    CHECK(buckets.plan(parameters, order).size() == 2);  // the second comes too late to wait for
    CHECK(untold.plan(parameters, order).size() == 1);   // a copy is a policy of its own
}
