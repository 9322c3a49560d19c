// SPDX-License-Identifier: BSL-1.0
#include <gradsync/engine/readiness.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

using namespace gradsync;
using detail::Readiness;
using Mark = Readiness::Mark;
using Fill = Readiness::Fill;

namespace {

/// `sizes[b]` gradients in bucket b, each dealt at random.
BucketPlan random_plan(const std::vector<std::size_t>& sizes, std::mt19937& random) {
    std::vector<std::size_t> order(std::accumulate(sizes.begin(), sizes.end(), std::size_t{0}));
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    BucketPlan plan;
    std::size_t next = 0;
    for (const std::size_t size : sizes) {
        plan.push_back({order.data() + next, size});
        next += size;
    }
    return plan;
}

}  // namespace

TEST_CASE("Readiness agrees with plain counts, for marks in random order") {
    std::mt19937 random(1);
    const BucketPlan plan = random_plan({1, 63, 64, 65, 2, 200, 128}, random);
    std::vector<std::uint32_t> uses;
    for (std::size_t i = 0; i < 523; ++i) uses.push_back(1 + static_cast<std::uint32_t>(random() % 3));
    Readiness readiness(uses, plan);

    for (int step = 0; step < 3; ++step) {
        REQUIRE(readiness.untouched());
        std::vector<std::size_t> marks;
        for (std::size_t i = 0; i < uses.size(); ++i) marks.insert(marks.end(), uses[i], i);
        std::shuffle(marks.begin(), marks.end(), random);
        std::vector<std::uint32_t> left = uses;
        std::vector<std::size_t> awaited;
        for (std::size_t b = 0; b < plan.size(); ++b) awaited.push_back(plan.bucket(b).size());
        for (const std::size_t i : marks) {
            REQUIRE(readiness.remaining(i) == left[i]);
            const Mark mark = readiness.mark(i);
            REQUIRE(mark == (--left[i] == 0 ? Mark::ready : Mark::more_to_come));
            if (mark != Mark::ready) continue;
            const std::size_t b = readiness.bucket_of(i);
            REQUIRE(!readiness.full(b));
            REQUIRE(readiness.fill(i) == (--awaited[b] == 0 ? Fill::bucket_full : Fill::filled));
            REQUIRE(readiness.full(b) == (awaited[b] == 0));
            REQUIRE(readiness.mark(i) == Mark::too_often);
            REQUIRE(!readiness.untouched());
        }
        readiness.reset();
    }
}

TEST_CASE("a gradient that two threads found ready is filled in once") {
    std::mt19937 random(2);
    const BucketPlan plan = random_plan({70}, random);
    Readiness readiness(std::vector<std::uint32_t>(70, 1), plan);
    CHECK(readiness.mark(3) == Mark::ready);
    CHECK(readiness.mark(3) == Mark::ready);
    CHECK(readiness.claim(3, true));
    CHECK(!readiness.claim(3, true));
    CHECK(!readiness.claim(3, false));
    CHECK(readiness.fill(3) == Fill::filled);
    CHECK(readiness.fill(3) == Fill::too_often);
    // Others of its word, some filled in and some not, do not notice.
    std::size_t left = 69;
    for (std::size_t i = 0; i < 70; ++i) {
        if (i == 3) continue;
        CHECK(readiness.mark(i) == Mark::ready);
        CHECK(readiness.fill(3) == Fill::too_often);
        CHECK(readiness.fill(i) == (--left == 0 ? Fill::bucket_full : Fill::filled));
        CHECK(readiness.mark(i) == Mark::too_often);
    }
    readiness.reset();
    CHECK(readiness.claim(3, false));
    CHECK(!readiness.claim(3, false));
    CHECK(!readiness.claim(3, true));
    readiness.rearm(3);
    CHECK(readiness.claim(3, true));
}

TEST_CASE("of several threads that mark the same gradients at once, one claims each and one fills it in") {
    std::mt19937 random(5);
    const BucketPlan plan = random_plan({130, 40}, random);
    Readiness readiness(std::vector<std::uint32_t>(170, 1), plan);
    for (int step = 0; step < 20; ++step) {
        std::vector<std::atomic<int>> claimed(170), filled(170);
        std::atomic<int> full{0};
        std::vector<std::thread> threads;
        for (std::size_t t = 0; t < 3; ++t)
            threads.emplace_back([&] {
                for (std::size_t i = 0; i < 170; ++i) {
                    if (readiness.mark(i) != Mark::ready) continue;
                    claimed[i] += readiness.claim(i, true);
                    const Fill fill = readiness.fill(i);
                    filled[i] += fill != Fill::too_often;
                    full += fill == Fill::bucket_full;
                }
            });
        for (std::thread& thread : threads) thread.join();
        for (std::size_t i = 0; i < 170; ++i) CHECK((claimed[i] == 1 && filled[i] == 1));
        CHECK(full == 2);
        readiness.reset();
    }
}

TEST_CASE("each bucket is found full by one of several threads") {
    std::mt19937 random(3);
    const BucketPlan plan = random_plan({1, 100, 64, 300}, random);
    const std::size_t count = 465;
    std::vector<std::uint32_t> uses(count, 1);
    for (std::size_t i = 0; i < count; i += 3) uses[i] = 2;
    Readiness readiness(uses, plan);
    std::vector<int> gradients(count);  // plain memory: what marks order
    for (int step = 0; step < 20; ++step) {
        std::vector<std::atomic<int>> found(plan.size());
        std::vector<std::thread> threads;
        for (std::size_t t = 0; t < 4; ++t)
            threads.emplace_back([&, t] {
                for (std::size_t i = t; i < count; i += 4) {
                    gradients[i] = step;
                    if (uses[i] == 2 && readiness.mark(i) != Mark::more_to_come) return;
                    if (readiness.mark(i) != Mark::ready || readiness.fill(i) != Fill::bucket_full) continue;
                    const std::size_t b = readiness.bucket_of(i);
                    bool all = true;
                    for (const std::size_t k : plan.bucket(b)) all = all && gradients[k] == step;
                    found[b] += all;
                }
            });
        for (std::thread& thread : threads) thread.join();
        for (std::size_t b = 0; b < plan.size(); ++b) CHECK(found[b] == 1);
        readiness.reset();
    }
}

TEST_CASE("settled gradients and buckets are full, and take no more marks") {
    std::mt19937 random(4);
    const BucketPlan plan = random_plan({80, 90}, random);
    std::vector<std::uint32_t> uses(171, 2);
    uses[170] = 0;  // frozen
    Readiness readiness(uses, plan);
    CHECK(readiness.mark(170) == Mark::too_often);

    readiness.fill_all(1, plan.bucket(1));
    CHECK(readiness.full(1));
    for (const std::size_t i : plan.bucket(0)) {
        CHECK(!readiness.full(0));
        readiness.mark(i);
        readiness.settle(i);
    }
    CHECK(readiness.full(0));
    for (std::size_t i = 0; i < uses.size(); ++i) CHECK(readiness.mark(i) == Mark::too_often);

    readiness.reset();
    CHECK(readiness.untouched());
    readiness.set_plan(random_plan({1, 169}, random));
    CHECK(readiness.untouched());
    CHECK(!readiness.full(0));
}
