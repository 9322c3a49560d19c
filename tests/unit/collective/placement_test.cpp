// SPDX-License-Identifier: BSL-1.0
#include <gradsync/collective/placement.hpp>

#include <doctest/doctest.h>

#include <vector>

using gradsync::collective::Group;
using gradsync::detail::Machines;

TEST_CASE("Machines: ranks have a place on their machine, in the order of the ranks") {
    const Machines machines({7, 3, 7, 3, 7});
    CHECK(machines.size() == 5);
    CHECK(machines.count() == 2);
    CHECK(machines.fewest() == 2);
    CHECK(machines.most() == 3);
    CHECK(machines.of(3) == 3);
    for (int r = 0; r < 5; ++r) CHECK(machines.local_rank(r) == r / 2);
}

TEST_CASE("Machines: counterparts have the same place, and are ordered by machine") {
    const Machines machines({7, 3, 7, 3, 7});
    const Group second = machines.counterparts(2);
    CHECK(second.members == List<int>{3, 2});
    CHECK(second.rank == 1);
    const Group third = machines.counterparts(4);
    CHECK(third.members == List<int>{4});
    CHECK(third.rank == 0);
}

TEST_CASE("Machines: of a group, those on one machine have its order") {
    const Machines machines({7, 3, 7, 3, 7});
    const Group group{.split = 2, .color = 5, .members = {4, 1, 0}};
    const Machines of_group = machines.of(group);
    for (int r = 0; r < 3; ++r) CHECK(of_group.of(r) == (r == 1 ? 3 : 7));
    const Group here = machines.here(group, 0);
    CHECK(here.split == 2);
    CHECK(here.color == 5);
    CHECK(here.members == List<int>{2, 0});  // local ranks
    CHECK(here.rank == 1);
    CHECK(machines.here(group, 1).members == List<int>{0});
}
