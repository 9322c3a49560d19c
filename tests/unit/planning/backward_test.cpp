// SPDX-License-Identifier: BSL-1.0
#include <gradsync/planning/backward.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <random>
#include <vector>

#include <gradsync/planning/partition.hpp>

#include "support/ranks.hpp"

using namespace gradsync::plan;

namespace {

using Ends = std::vector<std::size_t>;

struct Case {
    std::vector<ReadyGradient> gradients;
    Ends ends;
    CallCost cost;
    double backward = 0;
    Contention contention;
};

Case random_case(std::mt19937_64& random) {
    const auto uniform = [&](double least, double most) { return std::uniform_real_distribution<double>(least, most)(random); };
    Case c;
    const std::size_t n = 1 + random() % 12;
    for (std::size_t i = 0; i < n; ++i) {
        if (random() % 4 != 0) c.backward += uniform(0, 1);
        c.gradients.push_back({c.backward, random() % 100});
        if (random() % 3 == 0 || i + 1 == n) c.ends.push_back(i + 1);
    }
    if (random() % 3 == 0) c.backward += uniform(0, 1);
    c.cost = {uniform(0, 0.2), uniform(0, 0.02)};
    c.contention = {uniform(0.3, 1), uniform(0.3, 1)};
    return c;
}

/// Step by small step: what runs in each, and how fast.
struct Played {
    ContendedBackward result;
    std::vector<double> ready;       // of gradients, as a clock on the wall says
    std::vector<double> start, end;  // of buckets, the same
};
Played play(const Case& c) {
    constexpr double dt = 2e-5;
    Played played;
    const std::vector<BucketTime> buckets = buckets_of(c.gradients, c.ends);
    std::size_t bucket = 0;
    double now = 0, computed = 0, done = 0;
    while (bucket < buckets.size() || computed < c.backward) {
        while (played.ready.size() < c.gradients.size() && c.gradients[played.ready.size()].ready <= computed) played.ready.push_back(now);
        const bool computes = computed < c.backward;
        const bool travels = bucket < buckets.size() && buckets[bucket].ready <= computed;
        if (computes) computed += dt * (travels ? c.contention.compute : 1);
        if (travels && played.start.size() == bucket) played.start.push_back(now);
        if (travels && !computes) played.result.exposed += dt;
        if (travels) done += dt * (computes ? c.contention.link : 1);
        if (travels && computes) played.result.hidden += dt;
        now += dt;
        if (travels && done >= c.cost.seconds(static_cast<double>(buckets[bucket].bytes))) {
            played.end.push_back(now);
            done = 0;
            ++bucket;
        }
    }
    played.result.finish = now;
    while (played.ready.size() < c.gradients.size()) played.ready.push_back(now);
    return played;
}

}  // namespace

TEST_CASE("a backward that shares its cores is over when one played step by step is, and so its communication") {
    std::mt19937_64 random(1);
    for (int i = 0; i < 60; ++i) {
        const Case c = random_case(random);
        std::vector<BucketTime> buckets = buckets_of(c.gradients, c.ends);
        const ContendedBackward exact = schedule(buckets, c.cost, c.backward, c.contention);
        const Played played = play(c);
        CHECK(exact.finish == doctest::Approx(played.result.finish).epsilon(1e-3).scale(1));
        CHECK(exact.hidden == doctest::Approx(played.result.hidden).epsilon(1e-3).scale(1));
        CHECK(exact.exposed == doctest::Approx(played.result.exposed).epsilon(1e-3).scale(1));
        for (std::size_t b = 0; b < buckets.size(); ++b) {
            CHECK(buckets[b].start == doctest::Approx(played.start[b]).epsilon(1e-3).scale(1));
            CHECK(buckets[b].end == doctest::Approx(played.end[b]).epsilon(1e-3).scale(1));
        }
        CHECK(exact.finish == doctest::Approx(c.backward + (1 - c.contention.compute) * exact.hidden + exact.exposed));
        double work = 0;
        for (const BucketTime& b : buckets) work += c.cost.seconds(static_cast<double>(b.bytes));
        CHECK(work == doctest::Approx(c.contention.link * exact.hidden + exact.exposed));
        CHECK(exact.finish >= buckets.back().end);
    }
}

TEST_CASE("where neither notices the other, times are those of a schedule on a link of its own") {
    std::mt19937_64 random(2);
    for (int i = 0; i < 200; ++i) {
        const Case c = random_case(random);
        std::vector<BucketTime> contended = buckets_of(c.gradients, c.ends), plain = contended;
        const ContendedBackward result = schedule(contended, c.cost, c.backward, {});
        const double end = schedule(plain, c.cost);
        CHECK(result.finish == doctest::Approx(end > c.backward ? end : c.backward));
        for (std::size_t b = 0; b < plain.size(); ++b) {
            CHECK(contended[b].start == doctest::Approx(plain[b].start));
            CHECK(contended[b].end == doctest::Approx(plain[b].end));
        }
    }
}

TEST_CASE("times that were measured beside collectives give those of an undisturbed backward") {
    std::mt19937_64 random(3);
    for (int i = 0; i < 60; ++i) {
        const Case c = random_case(random);
        const Played played = play(c);
        std::vector<ReadyGradient> measured = c.gradients;
        for (std::size_t k = 0; k < measured.size(); ++k) measured[k].ready = played.ready[k];
        const std::vector<ReadyGradient> result = undisturbed(measured, c.ends, c.cost, c.contention);
        for (std::size_t k = 0; k < result.size(); ++k) {
            CHECK(result[k].ready == doctest::Approx(c.gradients[k].ready).epsilon(1e-3).scale(1));
            CHECK(result[k].bytes == c.gradients[k].bytes);
        }
    }
}

TEST_CASE("a share of nothing, or of more than all, is refused by its name") {
    std::vector<BucketTime> none;
    const auto refused = [&](const char* words, Contention contention) {
        const auto outcome = gradsync_test::outcome_of([&] { schedule(none, {}, 1, contention); });
        CHECK(outcome.is(gradsync::Errc::invalid_argument));
        CHECK_MESSAGE(outcome.says(words), outcome.text);
    };
    refused("that compute keeps", {0, 1});
    refused("that the link keeps", {1, 1.5});
}
