// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/planning/optimal_buckets.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include <gradsync/bucket/flat.hpp>
#include <gradsync/bucket/per_parameter.hpp>
#include <gradsync/planning/partition.hpp>

#include "support/plans.hpp"
#include "support/ranks.hpp"

using namespace gradsync;
using gradsync::plan::CallCost;
using gradsync::plan::ReadyGradient;

namespace {

struct Drawn {
    std::vector<ParameterInfo> parameters;
    std::vector<double> ready;  // by parameter; they become ready in order of registration
    CallCost cost;

    std::vector<ReadyGradient> gradients() const {
        std::vector<ReadyGradient> result;
        for (std::size_t i = 0; i < ready.size(); ++i) result.push_back({ready[i], parameters[i].bytes()});
        return result;
    }
    template <class Policy>
    double finish(const Policy& policy) const {
        std::vector<plan::BucketTime> times =
            plan::buckets_of(gradients(), policy.plan(parameters, gradsync_test::in_order(parameters.size())));
        return plan::schedule(times, cost);
    }
};

Drawn draw(std::mt19937_64& random, std::size_t count, std::size_t kinds) {
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
    constexpr DType dtypes[] = {DType::f32, DType::bf16, DType::f64};
    Drawn c;
    c.cost = {static_cast<double>(below(40)), static_cast<double>(1 + below(8)) / 16};
    double ready = 0;
    const std::size_t gap = std::size_t{1} << below(7), size = std::size_t{1} << below(7);
    for (std::size_t i = 0; i < count; ++i) {
        c.parameters.push_back({.count = below(size), .dtype = dtypes[below(kinds)]});
        c.ready.push_back(ready += static_cast<double>(below(gap)));
    }
    return c;
}

/// All ways to cut every kind into runs, each launched in the order of its last gradients, which is the best order.
double least_of_all(const Drawn& c) {
    const std::size_t n = c.parameters.size();
    double least = std::numeric_limits<double>::infinity();
    for (std::uint32_t closes = 0; closes < (1u << n); ++closes) {
        // Gradient i closes its bucket where bit i is set; the last one of its kind has to.
        std::vector<bool> open(dtype_count);
        bool valid = true;
        for (std::size_t i = 0; i < n; ++i) open[static_cast<std::size_t>(c.parameters[i].dtype)] = !(closes >> i & 1);
        for (const bool left : open) valid = valid && !left;
        if (!valid) continue;
        std::vector<plan::BucketTime> pending(dtype_count), launched;
        for (std::size_t i = 0; i < n; ++i) {
            plan::BucketTime& bucket = pending[static_cast<std::size_t>(c.parameters[i].dtype)];
            bucket.bytes += c.parameters[i].bytes();
            bucket.ready = c.ready[i];
            if (closes >> i & 1) {
                launched.push_back(bucket);
                bucket = {};
            }
        }
        least = std::min(least, plan::schedule(launched, c.cost));
    }
    return least;
}

}  // namespace

TEST_CASE("OptimalBuckets: no way to cut one, two or three kinds is through earlier") {
    std::mt19937_64 random(21);
    for (const std::size_t kinds : {1u, 2u, 3u})
        for (int repeat = 0; repeat < 1000; ++repeat) {
            const Drawn c = draw(random, 1 + random() % 9, kinds);
            INFO(kinds, " kinds, case ", repeat);
            REQUIRE(c.finish(OptimalBuckets(c.cost, c.ready)) == doctest::Approx(least_of_all(c)).epsilon(1e-12));
        }
}

TEST_CASE("OptimalBuckets is never later than capped, square-root, flat or per-parameter buckets") {
    std::mt19937_64 random(22);
    for (const std::size_t kinds : {1u, 2u, 3u})
        for (int repeat = 0; repeat < 60; ++repeat) {
            const Drawn c = draw(random, 80, kinds);
            const double least = c.finish(OptimalBuckets(c.cost, c.ready)) * (1 - 1e-12);
            std::size_t total = 0;
            for (const ParameterInfo& p : c.parameters) total += p.bytes();
            REQUIRE(c.finish(PerParameter{}) >= least);
            REQUIRE(c.finish(Flat{}) >= least);
            for (std::size_t cap = 1; cap < 2 * total; cap = cap * 3 / 2 + 1) REQUIRE(c.finish(SizeCappedBuckets(cap)) >= least);
            const double root = plan::square_root_bucket_bytes(static_cast<double>(total), c.cost);
            REQUIRE(c.finish(SizeCappedBuckets(1 + static_cast<std::size_t>(root))) >= least);
        }
}

TEST_CASE("OptimalBuckets makes the best common cuts for very many gradients of several kinds, never better than the optimum") {
    std::mt19937_64 random(23);
    double worst = 1;
    for (int repeat = 0; repeat < 300; ++repeat) {
        const std::size_t kinds = 2 + random() % 2;
        const Drawn c = draw(random, 1 + random() % 30, kinds);
        plan::KindedGradients all{c.gradients(), {}, dtype_count};
        for (const ParameterInfo& p : c.parameters) all.kinds.push_back(static_cast<std::size_t>(p.dtype));

        // The recurrence as it stands.
        const std::size_t n = all.gradients.size();
        std::vector<double> finish(n + 1);
        for (std::size_t i = 1; i <= n; ++i) {
            finish[i] = std::numeric_limits<double>::infinity();
            std::vector<bool> seen(dtype_count);
            double calls = 0, bytes = 0;
            for (std::size_t j = i; j-- > 0;) {
                calls += !seen[all.kinds[j]];
                seen[all.kinds[j]] = true;
                bytes += static_cast<double>(all.gradients[j].bytes);
                finish[i] = std::min(finish[i], std::max(finish[j], c.ready[i - 1]) + calls * c.cost.fixed + c.cost.per_byte * bytes);
            }
        }
        const auto through = [&](std::size_t states) {
            const plan::KindedBuckets found = plan::optimal_buckets(all, c.cost, states);
            std::vector<plan::BucketTime> buckets(found.count);
            for (std::size_t i = 0; i < n; ++i) {
                buckets[found.bucket_of[i]].bytes += all.gradients[i].bytes;
                buckets[found.bucket_of[i]].ready = all.gradients[i].ready;
            }
            return plan::schedule(buckets, c.cost);
        };
        const double common = through(1), exact = through(plan::exact_states);
        REQUIRE(common <= finish[n] * (1 + 1e-12));  // a bucket may leave before the last one of its cut is ready
        REQUIRE(common >= exact * (1 - 1e-12));
        if (exact > 0) worst = std::max(worst, common / exact);
    }
    MESSAGE("common cuts took up to ", worst, " times as long as the optimum");
}

TEST_CASE("OptimalBuckets plans as SizeCappedBuckets does without times") {
    const auto parameters = gradsync_test::floats({1'000'000, 10'000'000, 3, 4});
    const auto order = gradsync_test::reversed(4);
    CHECK(OptimalBuckets({1e-5, 1e-9}).plan(parameters, order) == SizeCappedBuckets().plan(parameters, order));
}

TEST_CASE("OptimalBuckets gives free calls a bucket a parameter, dear calls one bucket, and leaves out frozen parameters") {
    const auto parameters = gradsync_test::floats({10, 10, 10, 10});
    const std::vector<double> ready{4, 3, 0, 1};
    const std::vector<std::size_t> order{3, 1, 0};
    using gradsync_test::Buckets;
    CHECK(gradsync_test::buckets(OptimalBuckets({0, 1e-3}, ready).plan(parameters, order)) == Buckets{{3}, {1}, {0}});
    CHECK(gradsync_test::buckets(OptimalBuckets({99, 1e-3}, ready).plan(parameters, order)) == Buckets{{3, 1, 0}});
}

TEST_CASE("OptimalBuckets describes its numbers to the last digit") {
    CHECK(OptimalBuckets({1e-5, 1e-9}).describe() == OptimalBuckets({1e-5, 1e-9}).describe());
    CHECK(OptimalBuckets({1e-5, 1e-9}).describe() != OptimalBuckets({std::nextafter(1e-5, 1.0), 1e-9}).describe());
    CHECK(OptimalBuckets({1e-5, 1e-9}).describe() != OptimalBuckets({1e-5, std::nextafter(1e-9, 1.0)}).describe());
}

TEST_CASE("OptimalBuckets refuses invalid numbers") {
    using gradsync_test::outcome_of;
    const double nan = std::numeric_limits<double>::quiet_NaN();
    CHECK(outcome_of([] { OptimalBuckets({-1, 0}); }).says("the cost of a call"));
    CHECK(outcome_of([&] { OptimalBuckets({0, nan}); }).says("the cost of a byte"));
    CHECK(outcome_of([] { OptimalBuckets({0, 0}, {1, -1}); }).says("a time of readiness"));
    CHECK(outcome_of([] {
              OptimalBuckets({0, 0}, {1, 2}).plan(gradsync_test::floats({1}), gradsync_test::in_order(1));
          }).says("for 2 parameters, not for 1"));
}
