// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/bucket_plan.hpp>

#include <doctest/doctest.h>

#include <vector>

namespace gs = gradsync;

TEST_CASE("BucketPlan keeps buckets and their parameters in order") {
    gs::BucketPlan plan;
    CHECK(plan.empty());
    plan.push_back(std::vector<std::size_t>{4, 2});
    plan.push_back({});
    plan.push_back(std::vector<std::size_t>{0, 1, 3});
    REQUIRE(plan.size() == 3);
    CHECK(std::vector(plan.bucket(0).begin(), plan.bucket(0).end()) == std::vector<std::size_t>{4, 2});
    CHECK(plan.bucket(1).empty());
    CHECK(std::vector(plan.bucket(2).begin(), plan.bucket(2).end()) == std::vector<std::size_t>{0, 1, 3});
}

TEST_CASE("BucketPlans are equal only if their boundaries are") {
    gs::BucketPlan one, two;
    one.push_back(std::vector<std::size_t>{0, 1});
    two.push_back(std::vector<std::size_t>{0});
    two.push_back(std::vector<std::size_t>{1});
    CHECK(one != two);
    CHECK(one == gs::BucketPlan(one));
}

TEST_CASE("ParameterInfo counts bytes by dtype") {
    CHECK(gs::ParameterInfo{.count = 3, .dtype = gs::DType::bf16}.bytes() == 6);
    CHECK(gs::ParameterInfo{.count = 3, .dtype = gs::DType::f64}.bytes() == 24);
    CHECK(gs::ParameterInfo{}.bytes() == 0);
}
