// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/list.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

using gradsync::List;

TEST_CASE("List does what std::vector does, for any calls") {
    std::mt19937 random(1);
    for (std::size_t run = 0; run < 200; ++run) {
        List<std::string> list(run % 3, "first");
        std::vector<std::string> vector(run % 3, "first");
        for (int call = 0; call < 50; ++call) {
            const std::string text = std::to_string(random() % 5);
            switch (random() % 8) {
                case 0:
                case 1:
                case 2:
                    list.push_back(text);
                    vector.push_back(text);
                    break;
                case 3: {
                    const std::size_t size = random() % 9;
                    list.resize(size);
                    vector.resize(size);
                    break;
                }
                case 4:
                    list.erase_if([&](const std::string& one) { return one == text; });
                    std::erase(vector, text);
                    break;
                case 5:
                    if (vector.empty()) break;
                    list.pop_back();
                    vector.pop_back();
                    break;
                case 6: {
                    List<std::string> copy(list), other{"other", "two"};
                    other = copy;
                    list = std::move(other);
                    CHECK(list == copy);
                    break;
                }
                case 7: list.fill(text); std::fill(vector.begin(), vector.end(), text);
            }
            CHECK(std::vector<std::string>(list.begin(), list.end()) == vector);
        }
    }
}

TEST_CASE("List holds elements that only move, and destroys dropped ones at once") {
    const auto shared = std::make_shared<int>(3);
    List<std::shared_ptr<int>> list;
    for (int i = 0; i < 20; ++i) list.push_back(shared);
    CHECK(shared.use_count() == 21);
    list.resize(5);
    CHECK(shared.use_count() == 6);
    list.clear();
    CHECK(shared.use_count() == 1);

    List<std::unique_ptr<int>> owners;
    for (int i = 0; i < 9; ++i) owners.push_back(std::make_unique<int>(i));
    owners.erase_if([](const std::unique_ptr<int>& owner) { return *owner % 2 == 0; });
    REQUIRE(owners.size() == 4);
    for (std::size_t i = 0; i < 4; ++i) CHECK(*owners[i] == static_cast<int>(2 * i + 1));
}

TEST_CASE("List: one that grows piece by piece moves seldom") {
    List<int> list;
    const int* memory = nullptr;
    int moves = 0;
    for (std::size_t size = 1; size <= 100'000; size += 3) {
        list.resize(size);
        moves += list.data() == memory ? 0 : 1;
        memory = list.data();
    }
    CHECK(moves < 20);
}

TEST_CASE("List: an assignment that fits allocates nothing; a list is a range") {
    List<int> list{1, 2, 3};
    const int* const memory = list.data();
    list = List<int>{4, 5};
    const List<int> shorter{6};
    const int* const moved = list.data();
    list = shorter;
    CHECK(list.data() == moved);
    CHECK(memory != moved);
    CHECK(list == shorter);
    const std::span<const int> view = list;
    CHECK(view.size() == 1);
    CHECK(view[0] == 6);
    CHECK(List<int>(view) == list);
    CHECK_FALSE(list == List<int>{6, 7});
}

TEST_CASE("ListView views arrays, lists, vectors and spans, and converts back to a span") {
    int array[] = {1, 2, 3};
    const List<int> list(std::span<const int>{array});
    const auto sum = [](gradsync::ListView<const int> view) {
        int all = 0;
        for (const int one : view) all += one;
        return all;
    };
    CHECK(sum(array) == 6);
    CHECK(sum(list) == 6);
    CHECK(sum(std::vector{4, 5}) == 9);
    CHECK(sum(std::span(array).first(2)) == 3);
    CHECK(sum({}) == 0);
    const gradsync::ListView<int> view = array;
    CHECK(sum(view.first(1)) == 1);
    view[0] = 8;
    const std::span<const int> span = view;
    CHECK(span.size() == 3);
    CHECK(span.front() == 8);
    static_assert(!std::is_convertible_v<const List<int>&, gradsync::ListView<int>>);
    static_assert(!std::is_convertible_v<std::vector<long>, gradsync::ListView<const int>>);
}
