// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/planning/partition.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "support/slow_build.hpp"

using namespace gradsync::plan;
using gradsync_test::number_of_cases;

namespace {

using Ends = std::vector<std::size_t>;

struct Problem {
    std::vector<ReadyGradient> gradients;
    CallCost cost;
};

/// Gradients of all scales, evenly spaced, in bursts or all at once; calls that cost nothing, or more than the bytes.
Problem random_problem(std::mt19937_64& random, std::size_t most) {
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
    Problem c;
    c.cost = {below(4) == 0 ? 0.0 : static_cast<double>(below(50)), below(6) == 0 ? 0.0 : static_cast<double>(1 + below(8)) / 4};
    double ready = static_cast<double>(below(3));
    const std::size_t gap = std::size_t{1} << below(7), size = std::size_t{1} << below(8);
    for (std::size_t n = 1 + below(most); n > 0; --n) {
        c.gradients.push_back({ready, below(5) == 0 ? 0 : below(size)});
        if (below(3) != 0) ready += static_cast<double>(below(gap));
    }
    return c;
}

/// The time at which the last of these buckets has been reduced.
double finish_time(std::span<const ReadyGradient> gradients, const Ends& ends, CallCost cost) {
    std::vector<BucketTime> times = buckets_of(gradients, ends);
    return schedule(times, cost);
}

/// The optimum, computed directly from its equation (see partition.hpp) in O(n^2).
Ends optimal_ends_quadratic(std::span<const ReadyGradient> gradients, CallCost cost) {
    const std::size_t n = gradients.size();
    std::vector<double> bytes(n + 1);
    for (std::size_t i = 0; i < n; ++i) bytes[i + 1] = bytes[i] + static_cast<double>(gradients[i].bytes);
    std::vector<double> finish(n + 1);
    std::vector<std::size_t> previous(n + 1);
    for (std::size_t i = 1; i <= n; ++i) {
        finish[i] = std::numeric_limits<double>::infinity();
        for (std::size_t j = 0; j < i; ++j) {
            const double f = std::max(finish[j], gradients[i - 1].ready) + cost.seconds(bytes[i] - bytes[j]);
            if (f < finish[i]) {
                finish[i] = f;
                previous[i] = j;
            }
        }
    }
    Ends ends;
    for (std::size_t i = n; i > 0; i = previous[i]) ends.insert(ends.begin(), i);
    return ends;
}

/// All 2^(n-1) ways to cut.
double least_of_all(const Problem& c) {
    const std::size_t n = c.gradients.size();
    double least = std::numeric_limits<double>::infinity();
    for (std::uint32_t cuts = 0; cuts < (1u << (n - 1)); ++cuts) {
        Ends ends;
        for (std::size_t i = 1; i < n; ++i)
            if (cuts >> (i - 1) & 1) ends.push_back(i);
        ends.push_back(n);
        least = std::min(least, finish_time(c.gradients, ends, c.cost));
    }
    return least;
}

Ends capped(const Problem& c, double cap) {
    Ends ends;
    double bytes = 0;
    for (std::size_t i = 0; i < c.gradients.size(); ++i) {
        const auto more = static_cast<double>(c.gradients[i].bytes);
        if (i > 0 && bytes + more > cap) {
            ends.push_back(i);
            bytes = 0;
        }
        bytes += more;
    }
    ends.push_back(c.gradients.size());
    return ends;
}

bool is_partition(const Ends& ends, std::size_t n) {
    return !ends.empty() && ends.back() == n && ends.front() > 0 &&
           std::adjacent_find(ends.begin(), ends.end(), std::greater_equal<>()) == ends.end();
}

}  // namespace

TEST_CASE("both forms of the optimum are the least of all ways to cut") {
    std::mt19937_64 random(11);
    double worst_merged = 1;
    for (std::size_t repeat = 0; repeat < number_of_cases(6000); ++repeat) {
        const Problem c = random_problem(random, 11);
        const double least = least_of_all(c);
        const auto finish = [&](const Ends& ends) {
            REQUIRE(is_partition(ends, c.gradients.size()));
            return finish_time(c.gradients, ends, c.cost);
        };
        INFO("case ", repeat);
        REQUIRE(finish(optimal_ends_quadratic(c.gradients, c.cost)) == doctest::Approx(least).epsilon(1e-12));
        REQUIRE(finish(optimal_ends(c.gradients, c.cost)) == doctest::Approx(least).epsilon(1e-12));
        const double merged = finish(merged_ends(c.gradients, c.cost));
        REQUIRE(merged >= least * (1 - 1e-12));
        if (least > 0) worst_merged = std::max(worst_merged, merged / least);
    }
    MESSAGE("the greedy rule took up to ", worst_merged, " times as long");
    CHECK(worst_merged > 1);
}

TEST_CASE("long cases: both forms agree, and no rule is better") {
    std::mt19937_64 random(12);
    for (std::size_t repeat = 0; repeat < number_of_cases(300); ++repeat) {
        const Problem c = random_problem(random, 400);
        const double least = finish_time(c.gradients, optimal_ends(c.gradients, c.cost), c.cost);
        REQUIRE(least == doctest::Approx(finish_time(c.gradients, optimal_ends_quadratic(c.gradients, c.cost), c.cost)).epsilon(1e-12));
        double total = 0;
        for (const ReadyGradient& g : c.gradients) total += static_cast<double>(g.bytes);
        for (double cap = 1; cap < 2 * total + 2; cap *= 1.5)
            REQUIRE(finish_time(c.gradients, capped(c, cap), c.cost) >= least * (1 - 1e-12));
        if (c.cost.per_byte > 0)
            REQUIRE(finish_time(c.gradients, capped(c, square_root_bucket_bytes(total, c.cost)), c.cost) >= least * (1 - 1e-12));
        REQUIRE(finish_time(c.gradients, merged_ends(c.gradients, c.cost), c.cost) >= least * (1 - 1e-12));
    }
}

TEST_CASE("a million gradients take a moment") {
    std::vector<ReadyGradient> gradients;
    for (std::size_t i = 0; i < 1'000'000; ++i) gradients.push_back({static_cast<double>(i), i % 100});
    const Ends ends = optimal_ends(gradients, {3000, 0.02});
    CHECK(is_partition(ends, gradients.size()));
    CHECK(ends.size() > 10);
}

TEST_CASE("cuts of no gradients are empty") {
    CHECK(optimal_ends({}, {1, 1}).empty());
    CHECK(optimal_ends_quadratic({}, {1, 1}).empty());
    CHECK(merged_ends({}, {1, 1}).empty());
    CHECK(finish_time({}, Ends(), {1, 1}) == 0);
}

TEST_CASE("free calls leave at once, dear calls wait for one another") {
    const std::vector<ReadyGradient> gradients{{1, 10}, {2, 10}, {3, 10}};
    CHECK(optimal_ends(gradients, {0, 0.01}) == Ends{1, 2, 3});
    CHECK(optimal_ends(gradients, {1000, 0.01}) == Ends{3});
}

TEST_CASE("the square-root size is the least of s / (w k) + k o") {
    const double s = 440e6, w = 12.5e9, o = 30e-6;
    const double size = square_root_bucket_bytes(s, {o, 1 / w});
    CHECK(size == doctest::Approx(std::sqrt(s * w * o)));
    const auto overhead = [&](double k) { return s / (w * k) + k * o; };
    const double k = s / size;
    CHECK(overhead(k) <= overhead(k * 1.01));
    CHECK(overhead(k) <= overhead(k * 0.99));
}
