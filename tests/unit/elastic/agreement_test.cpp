// SPDX-License-Identifier: BSL-1.0
#include <gradsync/elastic/agreement.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <initializer_list>

using gradsync::List;
using namespace gradsync::elastic;

namespace {

Row row(std::initializer_list<Holding> holdings, std::uint64_t top = 0) {
    Row one{.top = top};
    int i = 0;
    for (const Holding& holding : holdings) one.holdings[i++] = holding;
    return one;
}

}  // namespace

TEST_CASE("members go on from the newest state that one of them has, and read it from the lowest such rank") {
    const Plan plan = agree({row({{}}), row({{4}}), row({{5}}), row({{4}, {5}})});
    CHECK(plan.base == 5);
    CHECK(plan.lost == 0);
    REQUIRE(plan.owners.size() == 1);
    CHECK(plan.owners[0] == 2);
}

TEST_CASE("nobody has a state") {
    CHECK(agree({row({{}}), row({{}}, 7)}).base == 0);
    CHECK(agree({}).base == 0);
}

TEST_CASE("of a state in parts, every part must be there, of the same division") {
    const Holding first{6, 0, 2}, second{6, 1, 2}, old_first{5, 0, 2}, old_second{5, 1, 2};
    CHECK(agree({row({first, old_first}), row({second, old_second})}).base == 6);
    const Plan plan = agree({row({first, old_first}), row({old_second})});
    CHECK(plan.base == 5);
    CHECK(plan.owners[0] == 0);
    CHECK(plan.owners[1] == 1);
    CHECK(agree({row({first}), row({{6, 1, 3}})}).base == 0);
    CHECK(agree({row({{6, 2, 2}}), row({first})}).base == 0);  // no such part
}

TEST_CASE("steps that are done again are counted") {
    const Plan plan = agree({row({{5}}, 5), row({{}}, 8)});
    CHECK(plan.base == 5);
    CHECK(plan.lost == 3);
}

TEST_CASE("a copy goes over neither the newest state nor that which it is a copy of") {
    Holdings own(1);
    CHECK(own.place_for(4) == Row::memory);
    own.fill(Row::memory, {4});
    CHECK(own.place_for(6) == 1);
    own.fill(1, {6});
    CHECK(own.place_for(6) == 0);
    CHECK(own.place_for(8) == 0);
    own.tear(Row::memory);
    own.fill(Row::memory, {5});
    CHECK(own.place_for(5, {0}, 0) == -1);  // the newest state and this one take both places
    Holdings more(2);
    more.fill(0, {5});
    more.fill(1, {6});
    CHECK(more.place_for(5) == 2);
}

TEST_CASE("a copy may go over the newest state if an earlier place has it too, as after a copy that was installed") {
    Holdings own(1);
    own.fill(Row::memory, {2});
    own.fill(1, {2});
    CHECK(own.place_for(3) == 1);
    Holdings part(3);
    part.fill(0, {5, 1, 3});
    part.fill(1, {5, 1, 3});
    part.fill(2, {5, 0, 2});  // another part, which stays
    part.fill(3, {4, 1, 3});
    CHECK(part.place_for(4) == 1);
    part.tear(1);
    part.fill(1, {5, 2, 3});
    CHECK(part.place_for(4, {1, 0, 1}, 0) == -1);
    CHECK(part.place_for(4, {0, 1, 2}, 0) == 3);  // others read that part elsewhere
}

TEST_CASE("if there is no other place, a copy goes over a part of the same state that nobody reads here") {
    Holdings own(3);
    own.fill(0, {5, 1, 4});
    own.fill(1, {5, 1, 3});
    own.fill(2, {5, 0, 2});
    CHECK(own.place_for(5, {0, 0, 0}, 0) == 3);
    own.fill(3, {5, 2, 3});
    CHECK(own.place_for(5, {0, 0, 0}, 0) == 0);  // all read the state in three parts
    CHECK(own.place_for(5, {1, 0, 0, 1}, 0) == 1);
    CHECK(own.place_for(5) == 0);  // a checkpoint has it
    own.tear(0);
    own.fill(0, {6, 0, 3});
    CHECK(own.place_for(5, {0, 0, 1}, 0) == 2);
    CHECK(own.place_for(5, {1, 1, 0}, 0) == 1);
}

TEST_CASE("when all have gone on from a state, later ones do not count") {
    Holdings own(1);
    own.fill(Row::memory, {4});
    own.fill(1, {6});
    own.go_on_from(4);
    CHECK(own.place_of({4}) == Row::memory);
    CHECK(own.place_of({6}) == -1);
    CHECK(own.row().top == 4);
}

TEST_CASE("a process that has had several parts of a state still has a place for another one") {
    Holdings holdings(3);  // as seed 43766 of the simulation had them
    holdings.fill(1, {4, 2, 4});
    holdings.fill(2, {4, 3, 4});
    holdings.fill(3, {4, 1, 4});
    holdings.fill(Row::memory, {4, 1, 4});
    holdings.go_on_from(4);
    CHECK(holdings.place_of({4, 1, 4}) == Row::memory);
    CHECK(holdings.place_of({4, 2, 4}) == 1);
    CHECK(holdings.place_of({4, 3, 4}) == -1);
    holdings.tear(Row::memory);
    holdings.fill(Row::memory, {5, 1, 4});
    List<std::uint32_t> owners;
    for (const std::uint32_t one : {0u, 1u, 1u, 2u}) owners.push_back(one);
    CHECK(holdings.place_for(4, owners, 1) == 2);
}
