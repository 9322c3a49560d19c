// SPDX-License-Identifier: BSL-1.0
#include <gradsync/elastic/agreement.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

using gradsync::List;
using namespace gradsync::elastic;

namespace {

Holding state(std::uint64_t number) { return {.number = number}; }
Holding parts(std::uint64_t number, std::uint32_t of, std::initializer_list<std::uint32_t> which) {
    Holding some{.number = number, .division = 7, .parts = of, .part = {Holding::none, Holding::none, Holding::none}};
    std::copy(which.begin(), which.end(), some.part);
    return some;
}
Plan plan(std::uint64_t number) { return {.base = state(number), .owners = List<std::uint32_t>(1, 0)}; }

Row row(std::initializer_list<Holding> holdings, std::uint64_t top = 0) {
    Row one{.top = top};
    int i = 0;
    for (const Holding& holding : holdings) one.holdings[i++] = holding;
    return one;
}

}  // namespace

TEST_CASE("members go on from the newest state that one of them has, and read it from the lowest such rank") {
    const Plan plan = agree({row({{}}), row({state(4)}), row({state(5)}), row({state(4), state(5)})});
    CHECK(plan.base.number == 5);
    CHECK(plan.lost == 0);
    REQUIRE(plan.owners.size() == 1);
    CHECK(plan.owners[0] == 2);
}

TEST_CASE("nobody has a state") {
    CHECK(agree({row({{}}), row({{}}, 7)}).base.number == 0);
    CHECK(agree({}).base.number == 0);
}

TEST_CASE("of a state in parts, every part must be there, of the same division") {
    const Holding first = parts(6, 2, {0}), second = parts(6, 2, {1}), old_first = parts(5, 2, {0}), old_second = parts(5, 2, {1});
    CHECK(agree({row({first, old_first}), row({second, old_second})}).base.number == 6);
    const Plan plan = agree({row({first, old_first}), row({old_second})});
    CHECK(plan.base.number == 5);
    CHECK(plan.owners[0] == 0);
    CHECK(plan.owners[1] == 1);
    CHECK(agree({row({first}), row({parts(6, 3, {1})})}).base.number == 0);
    Holding other = second;
    other.division = 8;
    CHECK(agree({row({first}), row({other})}).base.number == 0);
    CHECK(agree({row({parts(6, 2, {2})}), row({first})}).base.number == 0);  // no such part
    CHECK(agree({row({parts(6, 3, {0, 2})}), row({parts(6, 3, {1, 2})})}).owners[2] == 0);
}

TEST_CASE("steps that are done again are counted") {
    const Plan plan = agree({row({state(5)}, 5), row({{}}, 8)});
    CHECK(plan.base.number == 5);
    CHECK(plan.lost == 3);
}

TEST_CASE("a copy goes to an empty place, or over the oldest state, and never over the one that it is of") {
    Holdings own(2);
    CHECK(own.place_for(plan(4), 0) == Row::memory);
    own.fill(Row::memory, state(4));
    CHECK(own.place_for(plan(6), 0) == 1);
    own.fill(1, state(6));
    CHECK(own.place_for(plan(8), 0) == 0);
    CHECK(own.place_for(plan(6), 0) == 0);
    own.fill(0, state(5));
    CHECK(own.place_for(plan(5), 0) == 1);
}

TEST_CASE("parts that the members read here stay, unless an earlier place has them, too") {
    Holdings own(3);
    own.fill(0, parts(5, 3, {1, 2}));
    own.fill(1, parts(5, 2, {0}));
    own.fill(2, parts(5, 3, {0}));
    const auto from = [](std::initializer_list<std::uint32_t> owners) {
        return Plan{.base = parts(5, 3, {0}), .owners = List<std::uint32_t>(owners)};
    };
    CHECK(own.place_for(from({0, 0, 0}), 0) == 1);  // of another division
    own.fill(1, parts(5, 3, {1, 2}));
    CHECK(own.place_for(from({0, 0, 0}), 0) == 1);  // place 0 has the same
    own.fill(1, parts(5, 3, {1, 0}));
    CHECK(own.place_for(from({0, 1, 0}), 0) == 2);
    own.fill(2, parts(4, 3, {0}));
    CHECK(own.place_for(from({0, 0, 0}), 0) == 2);  // older
    own.tear(2);
    own.fill(2, parts(6, 3, {0}));
    CHECK(own.place_for(from({0, 0, 0}), 0) == 2);  // nobody has the rest of it
    own.fill(0, parts(5, 3, {1}));
    own.fill(1, parts(5, 3, {2}));
    own.fill(2, parts(5, 3, {0}));
    CHECK(own.place_for(from({0, 0, 0}), 0) == -1);
    CHECK(own.place_for(from({0, 0, 1}), 0) == 1);
}

TEST_CASE("the next state goes over an older one") {
    Holdings own(3);
    CHECK(own.place_for_next() == 0);
    own.fill(0, parts(5, 3, {1}));
    CHECK(own.place_for_next() == 1);
    own.fill(1, parts(6, 3, {1}));
    CHECK(own.place_for_next() == 0);
    own.fill(0, parts(6, 3, {2}));
    CHECK(own.place_for_next() == 2);
}

TEST_CASE("if every place has the newest state, there is none for the next one") {
    Holdings full(Row::most);
    for (int place = 0; place < Row::most; ++place) full.fill(place, parts(7, 2, {0}));
    CHECK(full.place_for_next() == -1);
    full.tear(3);
    CHECK(full.place_for_next() == 3);
}

TEST_CASE("when all have gone on from a state, later ones do not count") {
    Holdings own(2);
    own.fill(Row::memory, state(4));
    own.fill(1, state(6));
    own.go_on_from(Row::memory);
    CHECK(own.place_of(state(4)) == Row::memory);
    CHECK(own.place_of(state(6)) == -1);
    CHECK(own.row().top == 4);
}

TEST_CASE("ranks keep their parts in twos, or threes, on several hosts where that is possible") {
    for (std::uint32_t size = 1; size <= 9; ++size)
        for (std::uint32_t hosts = 1; hosts <= size; ++hosts) {
            List<std::uint64_t> of;
            std::vector<std::uint32_t> ranks_on(hosts);
            for (std::uint32_t r = 0; r < size; ++r) of.push_back(r * 7 % hosts), ++ranks_on[r * 7 % hosts];
            const bool is_possible = 2 * *std::max_element(ranks_on.begin(), ranks_on.end()) <= size;
            for (std::uint32_t r = 0; r < size; ++r) {
                const List<std::uint32_t> mates = mates_of(r, of, List<std::uint64_t>(size));
                CHECK(std::count(mates.begin(), mates.end(), r) == 1);
                if (size > 1) CHECK((mates.size() == 2 || (mates.size() == 3 && size % 2 == 1)));
                for (const std::uint32_t other : mates) CHECK(mates_of(other, of, List<std::uint64_t>(size)) == mates);
                const bool apart = std::any_of(mates.begin(), mates.end(), [&](std::uint32_t other) { return of[other] != of[r]; });
                if (is_possible && hosts > 1) CHECK(apart);
            }
        }
}

TEST_CASE("who leaves keeps its part together with one that stays") {
    for (std::uint32_t size = 2; size <= 8; ++size)
        for (std::uint32_t leavers = 1; leavers <= size / 2; ++leavers) {
            List<std::uint64_t> goes(size), hosts(size);
            for (std::uint32_t i = 0; i < leavers; ++i) goes[(i * 3 + 1) % size] = 1;
            for (std::uint32_t r = 0; r < size; ++r) {
                const List<std::uint32_t> mates = mates_of(r, hosts, goes);
                CHECK(std::any_of(mates.begin(), mates.end(), [&](std::uint32_t other) { return goes[other] == 0; }));
            }
        }
}
