// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: the second template argument of Reducer is a bucket policy .* a policy of your own needs a member BucketPlan plan\(
// expect 2: gradsync: the second template argument of Reducer is a bucket policy .* a policy of your own needs a member BucketPlan plan\(
// expect 3: gradsync: the second template argument of Reducer is a bucket policy .* a policy of your own needs a member BucketPlan plan\(
// expect 4: gradsync: give this bucket policy a member std::string describe\(\) const
// expect 5: gradsync: make this bucket policy copyable
// expect 6: gradsync: this bucket policy.s set_ready_seconds takes a std::span<const double>
// errors: 1
#include <memory>
#include <vector>

#include <gradsync/core/requirements.hpp>

using namespace gradsync;

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

struct Pairs {
#if GRADSYNC_EXPECT_FAILURE == 1
    std::vector<std::vector<std::size_t>> plan(std::span<const ParameterInfo>, std::span<const std::size_t>) const;  // no BucketPlan
#elif GRADSYNC_EXPECT_FAILURE == 2
    BucketPlan plan(std::span<const ParameterInfo>, std::span<const std::size_t>);  // not const
#elif GRADSYNC_EXPECT_FAILURE == 3
    BucketPlan plan(std::vector<ParameterInfo>&, std::span<const std::size_t>) const;
#else
    BucketPlan plan(std::span<const ParameterInfo>, std::span<const std::size_t>) const;
#endif
#if GRADSYNC_EXPECT_FAILURE != 4
    std::string describe() const;
#endif
#if GRADSYNC_EXPECT_FAILURE == 5
    std::unique_ptr<int> cap;
#elif GRADSYNC_EXPECT_FAILURE == 6
    void set_ready_seconds(std::vector<double> seconds);
#else
    int cap;
#endif
};

static_assert(require_bucket_policy<Pairs>());
