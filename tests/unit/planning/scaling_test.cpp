// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/planning/scaling.hpp>

#include <doctest/doctest.h>

#include <optional>
#include <vector>

#include <gradsync/planning/partition.hpp>

using namespace gradsync::plan;
using doctest::Approx;

TEST_CASE("without overlap a step is the sum; with it, what does not fit beside the backward is exposed") {
    const StepTimes compute{.forward = 0.1, .backward = 0.2, .optimizer = 0.05};
    const std::vector<ReadyGradient> gradients{{0.1, 100}, {0.2, 100}};
    const CallCost cost{0.01, 0.0008};  // 0.09 a gradient
    const std::vector<std::size_t> each{1, 2}, both{2};
    const StepForecast naive = forecast_step(compute, buckets_of(gradients, each), cost, false);
    CHECK(naive.step == Approx(0.35 + 0.18));
    CHECK(naive.exposed == Approx(0.18));
    CHECK(naive.communication == Approx(0.18));
    CHECK(naive.efficiency == Approx(0.35 / 0.53));
    CHECK(forecast_step(compute, buckets_of(gradients, both), cost, false).step == Approx(0.35 + 0.17));
    const StepForecast overlapped = forecast_step(compute, buckets_of(gradients, each), cost, true);
    CHECK(overlapped.step == Approx(0.35 + 0.09));
    CHECK(overlapped.communication == Approx(0.18));
    const StepForecast alone = forecast_step(compute, {}, cost, true);
    CHECK(alone.step == Approx(0.35));
    CHECK(alone.efficiency == 1);
}

TEST_CASE("the bound is the first world size at which communication takes longer") {
    const StepTimes compute{.forward = 0.1, .backward = 0.2};
    const double bytes = 100e6;
    for (const Link link : {Link{1e-5, 1e-9}, Link{1e-4, 1e-10}, Link{1e-7, 0.9e-9}, Link{0, 5e-9}})
        for (const Growth growth : {Growth::weak, Growth::strong})
            for (const Algorithm algorithm : {Algorithm::ring, Algorithm::tree}) {
                const auto found = communication_bound(compute, bytes / 2, bytes, algorithm, {.between = link}, growth);
                std::optional<int> data_parallel, forward, backward;
                for (int p = 2; p <= 20'000; ++p) {
                    const Cluster c{.ranks = p, .between = link};
                    const auto seconds = [&](Collective what, double n) { return collective_cost(what, algorithm, c).seconds(n); };
                    const double each = growth == Growth::weak ? 1 : p;
                    const double gather = seconds(Collective::all_gather, bytes / 2);
                    if (!data_parallel && seconds(Collective::all_reduce, bytes) > compute.backward / each) data_parallel = p;
                    if (!forward && gather > compute.forward / each) forward = p;
                    if (!backward && gather + seconds(Collective::reduce_scatter, bytes) > compute.backward / each) backward = p;
                }
                const auto same = [](std::optional<int> a, std::optional<int> by_hand) {
                    if (by_hand) CHECK(a == by_hand);
                    else CHECK((!a || *a > 20'000));
                };
                same(found.data_parallel, data_parallel);
                same(found.fsdp_forward, forward);
                same(found.fsdp_backward, backward);
            }
}

TEST_CASE("without latency, weak scaling is bound by bandwidth at once or never") {
    const StepTimes compute{.forward = 1, .backward = 2};
    CHECK(communication_bound(compute, 1e9, 1e9, Algorithm::ring, {.between = {0, 1e-9}}).data_parallel == std::nullopt);  // 2 s at most
    CHECK(communication_bound(compute, 1e9, 1e9, Algorithm::ring, {.between = {0, 2.1e-9}}).data_parallel == 2);
    CHECK(communication_bound(compute, 1e9, 1e9, Algorithm::ring, {.between = {0, 1.5e-9}}).data_parallel == 4);
}

TEST_CASE("nodes are added whole; recursive halving by powers of two; more calls reach the wall earlier") {
    const Cluster cluster{.ranks_per_node = 8, .between = {1e-5, 1e-10}, .within = {1e-6, 1e-11}};
    const StepTimes compute{.forward = 0.01, .backward = 0.02};
    const auto bound = [&](Algorithm a, double calls) {
        return communication_bound(compute, 50e6, 50e6, a, cluster, Growth::weak, calls).data_parallel;
    };
    const auto ring = bound(Algorithm::ring, 1), hierarchical = bound(Algorithm::hierarchical, 1);
    REQUIRE(ring);
    REQUIRE(hierarchical);
    CHECK(*ring % 8 == 0);
    CHECK(*hierarchical > 4 * *ring);
    CHECK(bound(Algorithm::ring, 10) < ring);
    const auto halving = bound(Algorithm::recursive_halving, 100);
    REQUIRE(halving);
    CHECK((*halving & (*halving - 1)) == 0);
}
