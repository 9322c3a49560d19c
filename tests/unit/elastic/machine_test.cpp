// SPDX-License-Identifier: BSL-1.0
#include <gradsync/elastic/machine.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

using gradsync::List;
using namespace gradsync::elastic;

namespace {

/// A member whose place is the second digit of its number.
Member member(std::uint64_t id) {
    Member one;
    one.id = id;
    one.place = static_cast<std::int64_t>(id % 10);
    return one;
}
List<Member> members(std::initializer_list<std::uint64_t> ids) {
    List<Member> all;
    for (const std::uint64_t id : ids) all.push_back(member(id));
    return all;
}

MemberSet ids(std::initializer_list<std::uint64_t> all) {
    MemberSet set;
    for (const std::uint64_t id : all) set.insert(id);
    return set;
}

/// "wait", "meet", "leave", or "propose 10 21"
std::string said(const View& view) {
    const Decision next = decide(view);
    if (next.step == Step::wait) return "wait";
    if (next.step == Step::meet) return "meet";
    if (next.step == Step::leave) return "leave";
    std::string text = "propose";
    for (const Member& one : next.members) text += " " + std::to_string(one.id);
    return text;
}

}  // namespace

TEST_CASE("the first generation is proposed when as many wait as the job has ranks, ordered by their places") {
    View view{.self = 12, .ranks = 3, .least = 3};
    for (const auto& [waiting, step] : {std::pair{members({12}), "wait"},
                                        {members({12, 10}), "wait"},
                                        {members({12, 10, 11}), "propose 10 11 12"},
                                        {members({12, 21, 20, 11}), "propose 20 11 21"}}) {
        view.waiting = waiting;
        CHECK(said(view) == step);
    }
}

TEST_CASE("who is listed meets the others, once, and while all members live") {
    View view{.self = 11, .left = 3, .newest = {4, members({10, 11, 12})}, .was = 3, .ranks = 3, .least = 3};
    CHECK(said(view) == "meet");
    view.left = 4;
    CHECK(said(view) == "propose 10 11 12");  // all live: they meet again
    view.left = 3;
    view.newest.members = members({10, 11});
    CHECK(said(view) == "wait");  // for one that takes the place of the third
    view.waiting = members({22});
    CHECK(said(view) == "propose 10 11 22");
    view.ended = true;
    CHECK(said(view) == "leave");
}

TEST_CASE("who is not listed leaves the proposal to members that live, and makes it if there are none") {
    View view{.self = 21, .newest = {7, members({10, 12})}, .was = 3, .waiting = members({21}), .ranks = 3, .least = 3};
    CHECK(said(view) == "wait");
    view.newest.members = {};
    CHECK(said(view) == "wait");  // too few
    view.waiting = members({22, 21, 20});
    CHECK(said(view) == "propose 20 21 22");
}

TEST_CASE("survivors keep their order, and the places decide where the others stand") {
    const View view{
        .self = 13, .left = 9, .newest = {9, members({11, 13})}, .was = 4, .waiting = members({22, 20, 24}), .ranks = 4, .least = 4};
    CHECK(said(view) == "propose 20 11 22 13");  // not the place 4, which nobody has lost
}

TEST_CASE("with fewer ranks allowed, members go on without a dead one, at once, and with those that wait and have answered") {
    View view{.self = 11, .left = 4, .newest = {4, members({10, 11})}, .was = 3, .ranks = 3, .least = 1};
    CHECK(said(view) == "propose 10 11");
    view.waiting = members({22});
    CHECK(said(view) == "propose 10 11 22");
    view.waiting = members({22, 33});  // no more than the job should have
    CHECK(said(view) == "propose 10 11 22");
    view.least = 3;
    view.waiting = {};
    CHECK(said(view) == "wait");
}

TEST_CASE("the first generation has fewer ranks only when the others are late") {
    View view{.self = 11, .waiting = members({10, 11}), .ranks = 3, .least = 2};
    CHECK(said(view) == "wait");
    view.late = true;
    CHECK(said(view) == "propose 10 11");
    view.least = 3;
    CHECK(said(view) == "wait");
}

TEST_CASE("if all members are dead, those that wait go on without waiting for more than the job needs when they are late") {
    View view{.self = 21, .newest = {4, {}}, .was = 3, .waiting = members({21, 22}), .ranks = 3, .least = 1};
    CHECK(said(view) == "wait");
    view.late = true;
    CHECK(said(view) == "propose 21 22");
}

TEST_CASE("members that have agreed to change wait for the first of them, unless it is dead or late") {
    View view{.self = 11, .left = 4, .agreed = true, .newest = {4, members({10, 11})}, .was = 2, .ranks = 4, .least = 1};
    CHECK(said(view) == "wait");
    view.self = 10;
    view.waiting = members({22});
    CHECK(said(view) == "propose 10 11 22");
    view.self = 11;
    view.newest.members = members({11});
    CHECK(said(view) == "propose 11 22");
    view.newest.members = members({10, 11});
    view.late = true;
    CHECK(said(view) == "propose 10 11 22");
}

TEST_CASE("the smaller part of the members lets the larger one go on, for as long as it may wait") {
    View view{.self = 12, .left = 4, .newest = {4, members({10, 11, 12})}, .was = 3, .absent = ids({10, 11}), .ranks = 3, .least = 1};
    CHECK(said(view) == "wait");
    view.late = true;
    CHECK(said(view) == "propose 12");
    view.late = false;
    view.absent = ids({12});
    view.self = 11;
    CHECK(said(view) == "propose 10 11");
    view.newest.members = members({10, 11});  // halves: that with the first member
    view.absent = ids({10});
    CHECK(said(view) == "wait");
    view.self = 10;
    view.absent = ids({11});
    CHECK(said(view) == "propose 10");
}

TEST_CASE("members that had the state count more than newcomers, who only break a tie") {
    View view{.self = 10, .left = 5, .newest = {5, members({10, 11, 12, 23, 24})}, .was = 5, .ranks = 5, .least = 1, .changes = true};
    view.settled = ids({10, 11, 12, 13});
    view.absent = ids({11, 12});
    CHECK(said(view) == "wait");  // it is with two newcomers, and others have the state
    view.self = 11;
    view.absent = ids({10, 23, 24});
    CHECK(said(view) == "propose 11 12");
    view.newest.members = members({10, 11, 23, 24});
    view.was = 4;
    view.absent = ids({10});
    CHECK(said(view) == "propose 11 23 24");
    view.self = 10;
    view.absent = ids({11, 23, 24});
    CHECK(said(view) == "wait");
    view.absent = ids({11, 23});  // halves of both: that with the first member
    CHECK(said(view) == "propose 10 24");
}

TEST_CASE("a newcomer goes on without others when it is late: it does not know who has the state") {
    View view{.self = 23,
              .left = 5,
              .newest = {5, members({10, 11, 23})},
              .was = 3,
              .absent = ids({11}),
              .ranks = 3,
              .least = 1,
              .changes = true};
    CHECK(said(view) == "wait");
    view.late = true;
    CHECK(said(view) == "propose 10 23");
    view.late = false;
    view.absent = {};
    CHECK(said(view) == "propose 10 11 23");
    view.newest.number = view.left = 1;  // nobody has a state
    view.absent = ids({11});
    CHECK(said(view) == "propose 10 23");
}

TEST_CASE("a process joins once, and again when the others have gone on without it") {
    Machine machine(3, 1, true);
    CHECK(machine.must_join());
    machine.join(member(11));
    CHECK_FALSE(machine.must_join());
    machine.see(members({10, 12}));
    CHECK_FALSE(machine.must_join());  // it still waits
    machine.see(members({10, 11, 12}));
    machine.see(members({10, 12}));
    CHECK(machine.must_join());
    machine.join(member(21));
    CHECK_FALSE(machine.must_join());
}

TEST_CASE("members want to change for one that waits and has answered, if there is room, and for one that leaves") {
    const auto nobody = [](const Member&) { return false; };
    Machine machine(3, 1, true);
    machine.join(member(10));
    machine.see(members({10, 11}));
    machine.see(member(22));
    CHECK_FALSE(machine.wants_change(nobody));
    machine.see_ready(22);
    CHECK(machine.wants_change(nobody));
    CHECK_FALSE(machine.wants_change([](const Member& one) { return one.id == 22; }));
    machine.see(members({10, 11, 12}));
    machine.see(member(33));
    machine.see_ready(33);
    CHECK_FALSE(machine.wants_change(nobody));
    machine.see_leaving(11);
    CHECK(machine.wants_change(nobody));
    machine.leave(2, true);
    const Decision next = decide(machine.view(nobody, false));
    REQUIRE(next.step == Step::propose);
    CHECK(next.members == members({10, 12, 33}));
}

TEST_CASE("a process that is gone is a member no more, and no spare either, though it lives on; who waits for a job that goes on is one") {
    const auto nobody = [](const Member&) { return false; };
    Machine machine(3, 1, true);
    machine.join(member(22));
    machine.see(member(22));
    CHECK_FALSE(machine.view(nobody).is_spare());  // there is no job yet
    machine.see(members({10, 11}));
    CHECK(machine.view(nobody).is_spare());
    machine.see_gone(11);
    CHECK(machine.view(nobody).newest.members == members({10}));
    CHECK(decide(machine.view(nobody, false)).step == Step::wait);
    machine.see_gone(10);
    CHECK_FALSE(machine.view(nobody).is_spare());
    machine.see(member(30));
    machine.see_gone(30);
    CHECK(decide(machine.view(nobody, true)).members == members({22}));
    Machine fixed(2, 2, false);
    fixed.join(member(22));
    fixed.see(members({10, 11}));
    CHECK_FALSE(fixed.view(nobody).is_spare());
}

TEST_CASE("a set of members knows those that were put in, in any order and repeatedly") {
    MemberSet set;
    CHECK_FALSE(set.contains(0));
    for (std::uint64_t i = 0; i < 1000; ++i) set.insert(i * 7919 % 1009 * 2);
    for (std::uint64_t i = 0; i < 1000; ++i) set.insert(i * 7919 % 1009 * 2);
    for (std::uint64_t i = 0; i < 1000; ++i) {
        CHECK(set.contains(i * 7919 % 1009 * 2));
        CHECK_FALSE(set.contains(i * 2 + 1));
    }
    set.clear();
    CHECK_FALSE(set.contains(0));
}

TEST_CASE("a member that another one cannot reach lets the others go on without it, for as long as it may wait") {
    const auto nobody = [](const Member&) { return false; };
    Machine machine(3, 1, true);
    machine.join(member(12));
    machine.see(members({10, 11, 12}));
    machine.leave(1);
    machine.miss(12);
    CHECK(decide(machine.view(nobody, false)).step == Step::wait);
    CHECK(decide(machine.view(nobody, true)).members == members({10, 11, 12}));
    machine.see(members({10, 12}));
    machine.leave(2);
    CHECK(decide(machine.view(nobody, false)).members == members({10, 12}));
}

TEST_CASE("who had the state is forgotten by a process that joins anew") {
    const auto nobody = [](const Member&) { return false; };
    Machine machine(3, 1, true);
    machine.join(member(12));
    machine.see(members({10, 11, 12}));
    machine.settle();
    machine.see(members({10, 11, 12, 23}));
    CHECK(machine.view(nobody).settled.contains(11));
    CHECK_FALSE(machine.view(nobody).settled.contains(23));
    machine.join(member(22));
    CHECK_FALSE(machine.view(nobody).settled.contains(11));
}

TEST_CASE("no more members leave at a time than stay, also when some of them have gone") {
    const auto nobody = [](const Member&) { return false; };
    for (const std::uint64_t self : {10u, 11u, 12u, 13u}) {
        Machine machine(4, 1, true);
        machine.join(members({self})[0]);
        machine.see(members({10, 11, 12, 13}));
        for (const std::uint64_t one : {10u, 11u, 13u}) machine.see_leaving(one);
        CHECK(machine.wants_change(nobody));
        machine.leave(1, true);
        for (const bool has_gone : {false, true}) {
            if (has_gone) machine.see_gone(10);
            CHECK(machine.may_leave(nobody) == (self == 10));
            CHECK(machine.view(nobody).staying().members == members({11, 12, 13}));
        }
        CHECK((decide(machine.view(nobody, false)).step == Step::propose) == (self == 11));
    }
}

TEST_CASE("a member that wants to leave stays until all agree to it: after a failure it may be the only one that has the state") {
    View view{.self = 11, .left = 4, .newest = {4, members({10, 11})}, .was = 3, .leaving = ids({10}), .ranks = 3, .least = 1};
    CHECK(said(view) == "propose 10 11");
    view.agreed = true;
    CHECK(said(view) == "propose 11");
    view.self = 10;
    CHECK(said(view) == "wait");
    view.leaving = ids({10, 11});  // all of them: they stay until others have the state
    view.waiting = members({22, 33});
    CHECK(said(view) == "propose 10 11 22 33");
}
