// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/shared.hpp>

#include <doctest/doctest.h>

#include <memory>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

using gradsync::detail::Shared;

namespace {

struct Base {
    int number = 7;
};
struct Counted : Base {
    explicit Counted(int& count) : alive(count) { ++alive; }
    ~Counted() { --alive; }
    int& alive;
};

}  // namespace

TEST_CASE("Shared: the last owner deletes the object, whatever its type") {
    int alive = 0;
    Shared<Base> base;
    CHECK(!base);
    {
        const auto first = Shared<Counted>::make(alive);
        Shared<Counted> second = first, third = std::move(second);
        CHECK(second.get() == nullptr);
        CHECK(third.get() == first.get());
        base = third;
        third = static_cast<const Shared<Counted>&>(third);  // itself
        CHECK(alive == 1);
    }
    CHECK(alive == 1);
    CHECK(base->number == 7);
    Shared<int> part(base, &base->number);
    base.reset();
    CHECK(alive == 1);
    CHECK(*part == 7);
    Shared<void> untyped = part;
    part = {};
    CHECK(alive == 1);
    untyped.reset();
    CHECK(alive == 0);
    CHECK(!Shared<int>(base, nullptr));
    static_assert(!std::is_convertible_v<Shared<Base>, Shared<Counted>>);
    static_assert(!std::is_convertible_v<Shared<const int>, Shared<int>>);
}

TEST_CASE("Shared: the last owner of a part of something else releases it") {
    int released = 0, object = 3;
    auto shared = Shared<int>::of(&object, [&](int* given) { released += *given; });
    Shared<void> other = shared;
    CHECK(other.as<int>().get() == &object);
    shared.reset();
    CHECK(released == 0);
    other.reset();
    CHECK(released == 3);
}

TEST_CASE("Shared: owns what a std::shared_ptr owns") {
    int alive = 0;
    auto standard = std::make_shared<Counted>(alive);
    Shared<Base> shared = standard;
    CHECK(shared.get() == standard.get());
    standard.reset();
    CHECK(alive == 1);
    shared.reset();
    CHECK(alive == 0);
    CHECK(!Shared<Base>(std::shared_ptr<Counted>()));
}

TEST_CASE("Shared may be copied and dropped in several threads") {
    int alive = 0;
    auto shared = Shared<Counted>::make(alive);
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t)
        threads.emplace_back([own = shared] {
            for (int i = 0; i < 10000; ++i) Shared<Counted>(own).reset();
        });
    shared.reset();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
    CHECK(alive == 0);
}
