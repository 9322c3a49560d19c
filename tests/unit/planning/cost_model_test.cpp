// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/planning/cost_model.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "support/ranks.hpp"

using namespace gradsync::plan;
using doctest::Approx;

namespace {

constexpr Link slow{3e-5, 1e-9}, fast{2e-6, 2e-11};

/// The time of the slowest rank in a ring, message by message: all ranks send one piece a step, and wait for one.
double ring_by_hand(int p, double bytes, int rounds, Link link) {
    double time = 0;
    for (int step = 0; step < rounds * (p - 1); ++step) time += link.alpha + link.beta * bytes / p;
    return time;
}

}  // namespace

TEST_CASE("a ring costs 2 (p-1) alpha + 2 (p-1)/p n beta; a reduce-scatter and an all-gather are its halves") {
    const double n = 1e6;
    for (const int p : {1, 2, 3, 8, 1000}) {
        const Cluster cluster{.ranks = p, .between = slow};
        const auto seconds = [&](Collective what) { return collective_cost(what, Algorithm::ring, cluster).seconds(n); };
        CHECK(seconds(Collective::all_reduce) == Approx(2 * (p - 1) * slow.alpha + 2.0 * (p - 1) / p * n * slow.beta).epsilon(1e-12));
        CHECK(seconds(Collective::all_reduce) == Approx(ring_by_hand(p, n, 2, slow)).epsilon(1e-12));
        CHECK(seconds(Collective::reduce_scatter) == Approx(ring_by_hand(p, n, 1, slow)).epsilon(1e-12));
        CHECK(seconds(Collective::all_gather) == seconds(Collective::reduce_scatter));
    }
}

TEST_CASE("trees and recursive halving cost what their messages do") {
    const double n = 1e6;
    const auto cost = [](Collective what, Algorithm a, int p) { return collective_cost(what, a, {.ranks = p, .between = slow}); };
    CHECK(cost(Collective::all_reduce, Algorithm::tree, 64).seconds(n) == Approx(2 * 6 * slow.alpha + 2 * n * slow.beta));
    CHECK(cost(Collective::all_reduce, Algorithm::tree, 65).fixed == Approx(2 * 7 * slow.alpha));
    CHECK(cost(Collective::broadcast, Algorithm::tree, 64).seconds(n) == Approx(6 * slow.alpha + n * slow.beta));

    // Halves of what is left, from partners at distances 1, 2, 4, ...
    double by_hand = 0, piece = n;
    for (int distance = 1; distance < 64; distance *= 2) by_hand += slow.alpha + slow.beta * (piece /= 2);
    CHECK(cost(Collective::reduce_scatter, Algorithm::recursive_halving, 64).seconds(n) == Approx(by_hand));
    CHECK(cost(Collective::all_gather, Algorithm::recursive_halving, 64).seconds(n) == Approx(by_hand));
    CHECK(cost(Collective::all_reduce, Algorithm::recursive_halving, 64).seconds(n) == Approx(2 * by_hand));
    // 65 ranks are 64 and one that hands over its data and gets the result.
    CHECK(cost(Collective::all_reduce, Algorithm::recursive_halving, 65).seconds(n) ==
          Approx(2 * by_hand + 2 * (slow.alpha + slow.beta * n)));
}

TEST_CASE("a hierarchical collective costs its stages within the nodes, across them, and within the nodes") {
    const double n = 64e6;
    const Cluster cluster{.ranks = 64, .ranks_per_node = 8, .between = slow, .within = fast};
    const double inner = ring_by_hand(8, n, 1, fast);
    // Eight rings across the nodes at once, an eighth of the bytes each, over one link a node.
    const double outer = 2 * 7 * (slow.alpha + 8 * slow.beta * (n / 8) / 8);
    CHECK(collective_cost(Collective::all_reduce, Algorithm::hierarchical, cluster).seconds(n) == Approx(inner + outer + inner));
    CHECK(collective_cost(Collective::reduce_scatter, Algorithm::hierarchical, cluster).seconds(n) == Approx(inner + outer / 2));
    // One ring through all of them carries as many bytes over the slow links, but 126 messages one after the other.
    const CallCost ring = collective_cost(Collective::all_reduce, Algorithm::ring, cluster);
    CHECK(ring.fixed == Approx(126 * slow.alpha));
    CHECK(ring.per_byte == Approx(2.0 * 63 / 64 * slow.beta));

    // On one node, or with one rank on each, there is nothing to be hierarchical about.
    const auto same = [&](Cluster c) {
        CHECK(collective_cost(Collective::all_reduce, Algorithm::hierarchical, c) ==
              collective_cost(Collective::all_reduce, Algorithm::ring, c));
    };
    same({.ranks = 8, .ranks_per_node = 8, .between = slow, .within = fast});
    same({.ranks = 8, .between = slow, .within = fast});
    same({.ranks = 5, .ranks_per_node = 8, .between = slow, .within = fast});
    CHECK(collective_cost(Collective::all_reduce, Algorithm::ring, {.ranks = 5, .ranks_per_node = 8, .between = slow, .within = fast})
              .fixed == Approx(8 * fast.alpha));
    Cluster other = cluster;
    other.across = Algorithm::tree;
    CHECK(collective_cost(Collective::all_reduce, Algorithm::hierarchical, other).seconds(n) ==
          Approx(2 * inner + 2 * 3 * slow.alpha + 2 * n * slow.beta));
}

TEST_CASE("a call costs its overhead; one rank alone costs nothing") {
    CHECK(collective_cost(Collective::all_reduce, Algorithm::ring, {.ranks = 2, .between = slow, .call_overhead = 7e-6}).fixed ==
          Approx(2 * slow.alpha + 7e-6));
    CHECK(collective_cost(Collective::all_reduce, Algorithm::ring, {.ranks = 1, .between = slow, .call_overhead = 7e-6}).seconds(1e9) == 0);
}

TEST_CASE("ring_latency_wall is the number of ranks at which latency costs as much as bandwidth") {
    // 25 MiB at 10 GB/s and 5.12 microseconds a message: 512 ranks.
    const Link link{5.12e-6, 1e-10};
    const double bytes = 25 << 20;
    CHECK(ring_latency_wall(link, bytes) == Approx(512));
    const CallCost cost = collective_cost(Collective::all_reduce, Algorithm::ring, {.ranks = 512, .between = link});
    CHECK(cost.fixed == Approx(cost.per_byte * bytes));
}

TEST_CASE("collective_cost refuses invalid clusters") {
    const auto refused = [](const char* words, Cluster c) {
        const auto outcome = gradsync_test::outcome_of([&] { collective_cost(Collective::all_reduce, Algorithm::ring, c); });
        CHECK(outcome.is(gradsync::Errc::invalid_argument));
        CHECK_MESSAGE(outcome.says(words), outcome.text);
    };
    refused("at least 1 rank, not 0", {.ranks = 0});
    refused("at least 1 rank, not -1", {.ranks = 1, .ranks_per_node = -1});
    refused("10 ranks do not fill nodes of 4", {.ranks = 10, .ranks_per_node = 4});
    refused("0 or more", {.ranks = 2, .between = {-1e-6, 0}});
    refused("0 or more", {.ranks = 2, .between = {0, std::numeric_limits<double>::quiet_NaN()}});
    refused("`across` must not be hierarchical", {.ranks = 2, .across = Algorithm::hierarchical});
}
