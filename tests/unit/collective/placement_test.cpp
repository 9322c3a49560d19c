// SPDX-License-Identifier: BSL-1.0
#include <gradsync/collective/placement.hpp>

#include <doctest/doctest.h>

#include <vector>

using gradsync::List;
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

TEST_CASE("Machines: counterparts have the same place in their teams, and are ordered by team") {
    const Machines teams = Machines({7, 7, 7, 7, 3, 3}).teams();
    const Group second = teams.counterparts(5);
    CHECK(second.members == List<int>{1, 5});
    CHECK(second.rank == 1);
    const Group third = teams.counterparts(2);
    CHECK(third.members == List<int>{2});
    CHECK(third.rank == 0);
}

TEST_CASE("Machines: teams are the largest nodes of the tree of sums on one machine") {
    const auto teams = [](List<int> machines) {
        const Machines all = Machines(std::move(machines)).teams();
        List<int> numbers;
        for (int r = 0; r < all.size(); ++r) numbers.push_back(all.of(r));
        return numbers;
    };
    CHECK(teams({3, 3, 3}) == List<int>{0, 0, 0});
    CHECK(teams({0, 0, 1, 1}) == List<int>{0, 0, 2, 2});
    CHECK(teams({0, 0, 0, 1}) == List<int>{0, 0, 2, 3});
    CHECK(teams({0, 1, 0, 1}) == List<int>{0, 1, 2, 3});
    CHECK(teams({7, 7, 7, 7, 2, 2}) == List<int>{0, 0, 0, 0, 4, 4});
    CHECK(teams({0, 1, 1}) == List<int>{0, 1, 2});  // ranks 0 and 1 come first
    CHECK(teams({0, 0, 0, 0, 1, 1, 1}) == List<int>{0, 0, 0, 0, 4, 4, 4});
    CHECK(Machines({0, 0, 0, 0, 1, 1, 1}).teams().counts() == List<std::size_t>{4, 3});
}

TEST_CASE("Machines: of a group, those on one machine have its order; a team is such a group") {
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

    const Machines six({7, 7, 7, 7, 3, 3});
    const Group team = six.here(six.teams().neighbourhood(5), 5);
    CHECK(team.members == List<int>{0, 1});
    CHECK(team.rank == 1);
}
