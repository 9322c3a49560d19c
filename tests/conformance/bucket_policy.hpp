// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <future>
#include <initializer_list>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <gradsync/core/bucket_plan.hpp>

#include "conformance/settings.hpp"

/// What every bucket policy promises, on random parameters. A new policy needs one file:
///
///     TEST_CASE("MyBuckets is a bucket policy") {
///         gradsync_test::check_bucket_policy(MyBuckets{...}, {.spares_copies = true}, {MyBuckets{...}});
///     }

namespace gradsync_test {

/// The largest number of bytes that bucket number `k` of a kind may hold if it holds more than one parameter. Buckets of one parameter that
/// is cheaper alone are not counted. By default a policy has no such limit.
using BucketCap = std::size_t (*)(std::size_t k);
inline std::size_t no_cap(std::size_t) { return std::numeric_limits<std::size_t>::max(); }

/// The promises of one policy that the concept does not ask for.
struct BucketPromises {
    BucketCap cap = no_cap;
    /// It gives each parameter that is `cheaper_alone` a bucket of its own. If false, its plan must not depend on that hint.
    bool spares_copies = false;
};

struct PlanningCase {
    std::vector<gradsync::ParameterInfo> parameters;
    std::vector<std::size_t> order;  ///< a permutation of some of them
};

/// Sizes from 0 to about 4 MiB over all scales; one kind or many; some parameters cheaper alone, or none; all parameters or some in the order.
/// `few_kinds`: at most four.
inline PlanningCase random_planning_case(std::mt19937_64& random, std::size_t count, bool few_kinds = false) {
    using namespace gradsync;
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
    PlanningCase result;
    const bool one_kind = below(3) == 0, some_alone = below(2) == 0, all = below(2) == 0;
    for (std::size_t i = 0; i < count; ++i) {
        ParameterInfo info;
        auto& [elements, dtype, space, value_dtype, cheaper_alone, whole] = info;  // does not compile if a field is missing here
        elements = below(std::size_t{1} << below(21));
        if (few_kinds) {
            dtype = static_cast<DType>(below(2));
            whole = below(2) == 0;
        } else if (!one_kind) {
            dtype = static_cast<DType>(below(dtype_count));
            if (below(3) == 0) value_dtype = static_cast<DType>(below(dtype_count));
            space = below(4) == 0 ? MemorySpace::device : MemorySpace::host;
            whole = below(3) == 0;
        }
        cheaper_alone = some_alone && below(5) == 0;
        result.parameters.push_back(info);
        if (all || below(4) != 0) result.order.push_back(i);
    }
    if (below(2) == 0) std::reverse(result.order.begin(), result.order.end());
    else std::shuffle(result.order.begin(), result.order.end(), random);
    return result;
}

/// Checks one plan. Says what is broken, and fails only once, so that a broken policy does not drown the reader.
inline std::string plan_violation(const PlanningCase& c, const gradsync::BucketPlan& plan, const BucketPromises& promises) {
    using namespace gradsync;
    constexpr auto nowhere = std::numeric_limits<std::size_t>::max();
    std::vector<std::size_t> place(c.parameters.size(), nowhere);
    for (std::size_t at = 0; at < c.order.size(); ++at) place[c.order[at]] = at;
    std::vector<bool> seen(c.parameters.size());
    std::vector<std::size_t> opened(ParameterInfo::kind_count);
    std::vector<std::pair<std::size_t, std::size_t>> by_opening;  // first place in order, bucket
    std::size_t total = 0, last_launch = 0;
    for (std::size_t b = 0; b < plan.size(); ++b) {
        const std::string name = "bucket " + std::to_string(b);
        const auto bucket = plan.bucket(b);
        if (bucket.empty()) return name + " is empty";
        std::size_t last = 0, previous = 0;
        for (const std::size_t i : bucket) {
            if (i >= c.parameters.size() || place[i] == nowhere)
                return name + " holds parameter " + std::to_string(i) + ", which does not take part";
            if (seen[i]) return "parameter " + std::to_string(i) + " stands in the plan twice";
            seen[i] = true;
            const ParameterInfo &own = c.parameters[i], &first = c.parameters[bucket[0]];
            if (own.dtype != first.dtype) return name + " mixes dtypes";
            if (own.value_dtype != first.value_dtype) return name + " mixes dtypes of values";
            if (own.space != first.space) return name + " mixes memory spaces";
            if (own.kind() != first.kind()) return name + " mixes kinds";
            if (promises.spares_copies && own.cheaper_alone && bucket.size() > 1)
                return name + " holds parameter " + std::to_string(i) + ", which is cheaper alone, and others";
            if (i != bucket[0] && place[i] < previous) return name + " does not keep the order";
            previous = place[i];
            last = std::max(last, place[i]);
        }
        if (b != 0 && last < last_launch) return name + " is complete before its predecessor";
        last_launch = last;
        total += bucket.size();
        by_opening.emplace_back(place[bucket[0]], b);
    }
    if (total != c.order.size())
        return "only " + std::to_string(total) + " of " + std::to_string(c.order.size()) + " parameters are in the plan";

    std::sort(by_opening.begin(), by_opening.end());
    for (const auto& [first, b] : by_opening) {
        const auto bucket = plan.bucket(b);
        if (bucket.size() == 1 && c.parameters[bucket[0]].cheaper_alone) continue;  // uses no cap
        const std::size_t k = opened[c.parameters[bucket[0]].kind()]++;
        std::size_t bytes = 0;
        for (const std::size_t i : bucket) bytes += c.parameters[i].bytes();
        if (bucket.size() > 1 && bytes > promises.cap(k))
            return "bucket " + std::to_string(b) + " holds " + std::to_string(bytes) + " bytes, above its cap";
    }
    return {};
}

/// The case without the hint `cheaper_alone`.
inline PlanningCase without_hints(PlanningCase c) {
    for (gradsync::ParameterInfo& info : c.parameters) info.cheaper_alone = false;
    return c;
}

template <gradsync::BucketPolicy Policy>
void check_plan(const Policy& policy, const PlanningCase& c, const BucketPromises& promises) {
    const gradsync::BucketPlan plan = policy.plan(c.parameters, c.order);
    REQUIRE(plan_violation(c, plan, promises) == "");
    REQUIRE(policy.plan(c.parameters, c.order) == plan);  // a pure function: so do copies, on other ranks
    REQUIRE(Policy(policy).plan(c.parameters, c.order) == plan);
    REQUIRE(std::async(std::launch::async, [&] { return policy.plan(c.parameters, c.order); }).get() == plan);
}

/// `others`: the same policy with other settings, one for each that it has. `describe()` must tell them apart, because the ranks compare
/// it. Settings that are the numbers of an aggregate are changed here.
template <gradsync::BucketPolicy Policy>
void check_bucket_policy(const Policy& policy, const BucketPromises& promises = {},
                         std::initializer_list<std::type_identity_t<Policy>> others = {}) {
    std::mt19937_64 random(20240229);
    for (const std::size_t count : {0u, 1u, 2u, 3u, 10u, 100u, 1000u})
        for (int repeat = 0; repeat < (count < 1000 ? 50 : 10); ++repeat) {
            const PlanningCase c = random_planning_case(random, count);
            check_plan(policy, c, promises);
            INFO("the plan depends on cheaper_alone; if that is meant, promise spares_copies");
            if (!promises.spares_copies) REQUIRE(policy.plan(without_hints(c).parameters, c.order) == policy.plan(c.parameters, c.order));
        }
    CHECK(policy.plan({}, {}).empty());
    CHECK(!std::string(policy.describe()).empty());
    CHECK(std::string(policy.describe()) == std::string(Policy(policy).describe()));
    check_settings_are_told(policy);
    for (const Policy& other : others) CHECK(std::string(policy.describe()) != std::string(other.describe()));

    SUBCASE("a hundred thousand parameters") {
        // Time may grow with the number of kinds, but not with the square of the number of parameters.
        const PlanningCase c = random_planning_case(random, 100'000, true);
        CHECK(plan_violation(c, policy.plan(c.parameters, c.order), promises) == "");
    }
    if constexpr (gradsync::TimedBucketPolicy<Policy>)
        for (const std::size_t count : {0u, 1u, 2u, 10u, 60u}) {
            const PlanningCase c = random_planning_case(random, count, true);
            std::vector<double> times(count);
            for (double& time : times) time = static_cast<double>(random() % 1000) * 1e-5;
            Policy timed = policy;
            timed.set_ready_seconds(times);
            check_plan(timed, c, {.cap = promises.cap});  // times may matter more than copies
            const gradsync::BucketPlan plan = timed.plan(c.parameters, c.order);
            std::fill(times.begin(), times.end(), 1e3);
            REQUIRE(timed.plan(c.parameters, c.order) == plan);  // it has copied the times
        }
}

}  // namespace gradsync_test
