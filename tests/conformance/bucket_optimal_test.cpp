// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/planning/optimal_buckets.hpp>

#include "conformance/bucket_policy.hpp"

namespace {

/// OptimalBuckets for gradients that become ready at times in proportion to the bytes so far.
struct Profiled {
    gradsync::plan::CallCost cost;

    gradsync::BucketPlan plan(std::span<const gradsync::ParameterInfo> parameters, std::span<const std::size_t> order) const {
        std::vector<double> ready(parameters.size());
        double sum = 0;
        for (const std::size_t i : order) ready[i] = sum += 1e-9 * static_cast<double>(parameters[i].bytes());
        return gradsync::OptimalBuckets(cost, ready).plan(parameters, order);
    }
    std::string describe() const { return gradsync::OptimalBuckets(cost).describe(); }
};

}  // namespace

TEST_CASE("OptimalBuckets is a bucket policy, before it has been told times") {
    gradsync_test::check_bucket_policy(gradsync::OptimalBuckets({1e-5, 1e-9}), {.spares_copies = true},
                                       {gradsync::OptimalBuckets({2e-5, 1e-9}), gradsync::OptimalBuckets({1e-5, 2e-9})});
}
TEST_CASE("OptimalBuckets is a bucket policy, where calls are dear") { gradsync_test::check_bucket_policy(Profiled{{1e-4, 1e-10}}); }
TEST_CASE("OptimalBuckets is a bucket policy, where bytes are dear") { gradsync_test::check_bucket_policy(Profiled{{1e-7, 2e-9}}); }
