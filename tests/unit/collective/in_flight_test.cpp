// SPDX-License-Identifier: BSL-1.0
#include <gradsync/collective/in_flight.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

namespace gs = gradsync;
using gs::collective::InFlight;

TEST_CASE("InFlight: entries have consecutive numbers from 0, and leave at the front") {
    InFlight<int> ring(4);
    CHECK(ring.empty());
    for (int i = 0; i < 3; ++i) CHECK(ring.add([&](int& place, std::uint64_t) { place = 10 * i; }) == static_cast<std::uint64_t>(i));
    CHECK(ring.size() == 3);
    CHECK(ring.oldest() == 0);
    CHECK(ring[2] == 20);

    ring.retire([](int entry) { return entry < 20; });
    CHECK(ring.first() == 2);
    CHECK(ring.next() == 3);
    CHECK(ring.is_over(1));
    CHECK_FALSE(ring.is_over(2));
    CHECK(ring.oldest() == 20);

    ring.retire([](int) { return true; });
    CHECK(ring.empty());
    CHECK(ring.first() == ring.next());
}

TEST_CASE("InFlight: an entry behind one that is not over stays") {
    InFlight<bool*> ring;
    bool over[2] = {false, true};
    for (bool& one : over) ring.add([&](bool*& place, std::uint64_t) { place = &one; });
    ring.retire([](const bool* entry) { return *entry; });
    CHECK(ring.size() == 2);
    over[0] = true;
    ring.retire([](const bool* entry) { return *entry; });
    CHECK(ring.empty());
}

TEST_CASE("InFlight: what throws while it begins is not added, and its number is used again") {
    InFlight<int> ring(2);
    ring.add([](int& place, std::uint64_t) { place = 1; });
    CHECK_THROWS_AS(ring.add([](int&, std::uint64_t) { throw std::runtime_error("refused"); }), std::runtime_error);
    CHECK(ring.size() == 1);
    CHECK(ring.add([](int& place, std::uint64_t) { place = 2; }) == 1);
    CHECK(ring.oldest() == 1);
    CHECK(ring[1] == 2);
}

TEST_CASE("InFlight: a place keeps its memory for the next entry, also when the ring grows") {
    InFlight<std::vector<int>> ring(2);
    const int* memory = nullptr;
    ring.add([&](std::vector<int>& place, std::uint64_t) {
        place.assign(1000, 7);
        memory = place.data();
    });
    ring.retire([](const auto&) { return true; });
    ring.add([](std::vector<int>& place, std::uint64_t) { CHECK(place.empty()); });
    ring.add([&](std::vector<int>& place, std::uint64_t) { CHECK(place.data() == memory); });
    ring.add([](std::vector<int>& place, std::uint64_t) { place = {3}; });  // grows
    CHECK(ring[2].data() == memory);
    CHECK(ring[2].size() == 1000);
    CHECK(ring[3] == std::vector<int>{3});
}

TEST_CASE("InFlight does what a deque does, for entries that can only be moved") {
    std::mt19937 random(20);
    for (const std::size_t capacity : {1u, 2u, 3u, 8u}) {
        InFlight<std::unique_ptr<int>> ring(capacity);
        std::deque<int> plain;
        std::uint64_t first = 0;
        for (int step = 0; step < 2000; ++step) {
            if (random() % 3 != 0) {
                ring.add([&](std::unique_ptr<int>& place, std::uint64_t n) {
                    CHECK(n == first + plain.size());
                    place = std::make_unique<int>(step);
                });
                plain.push_back(step);
            } else {
                std::size_t leave = random() % 5;
                ring.retire([&](const std::unique_ptr<int>& entry) {
                    if (leave == 0) return false;
                    CHECK(*entry == plain.front());
                    plain.pop_front();
                    ++first;
                    --leave;
                    return true;
                });
            }
            REQUIRE(ring.first() == first);
            REQUIRE(ring.size() == plain.size());
            for (std::size_t i = 0; i < plain.size(); ++i) REQUIRE(*ring[first + i] == plain[i]);
        }
    }
}
