// SPDX-License-Identifier: BSL-1.0
#pragma once

/// What every store promises (the concept `gradsync::Store`). A new one needs a small file: a place, and how a process or thread comes to it.
///
///     struct MyPlace {
///         MyStore open() const;
///     };

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/bootstrap/store/store.hpp>

#include "support/forked.hpp"

namespace gradsync_test {

inline gradsync::Blob words(const std::string& text) {
    gradsync::Blob bytes(text.size());
    std::transform(text.begin(), text.end(), bytes.begin(), [](char c) { return static_cast<std::byte>(c); });
    return bytes;
}
inline std::string text_of_words(const gradsync::Blob& bytes) { return std::string(gradsync::bootstrap::text_of(bytes)); }

/// Creates, again and again while the store cannot be reached.
template <gradsync::Store S>
gradsync::Blob create_at_last(S& store, const std::string& name, const gradsync::Blob& bytes) {
    for (int tries = 0;; ++tries) try {
            return store.create(name, bytes);
        } catch (const gradsync::Error& error) {
            if (error.errc() != gradsync::Errc::storage || tries == 1000) throw;
        }
}
/// Reads until the name is there.
template <gradsync::Store S>
gradsync::Blob read_at_last(S& store, const std::string& name) {
    for (int tries = 0; tries < 100'000; ++tries) try {
            if (auto found = store.read(name)) return *found;
        } catch (const gradsync::Error& error) {
            if (error.errc() != gradsync::Errc::storage) throw;
        }
    throw std::runtime_error(name + " never appears");
}

/// Every writer brings other bytes for each of the names. Returns what one of them got.
template <gradsync::Store S>
std::string race(S& store, int writer) {
    std::string got;
    for (int round = 0; round < 30; ++round) {
        const std::string name = "race/" + std::to_string(round);
        got += text_of_words(create_at_last(store, name, words("writer " + std::to_string(writer)))) + "\n";
        if (text_of_words(read_at_last(store, name)) + "\n" != got.substr(got.rfind("writer"))) return "read something else";
    }
    return got;
}

template <class Place>
void check_store(const Place& place) {
    using gradsync::Errc;
    using gradsync::Error;
    auto store = place.open();
    SUBCASE("what the first writer puts stays") {
        CHECK(create_at_last(store, "job", words("one")) == words("one"));
        CHECK(create_at_last(store, "job", words("another")) == words("one"));
        auto other = place.open();
        CHECK(create_at_last(other, "job", words("a third")) == words("one"));
        CHECK(read_at_last(other, "job") == words("one"));
    }
    SUBCASE("bytes of any length and value come back") {
        for (const std::size_t length : {std::size_t{0}, std::size_t{1}, std::size_t{4096}, gradsync::largest_blob}) {
            gradsync::Blob bytes(length);
            for (std::size_t i = 0; i < length; i += 97) bytes[i] = static_cast<std::byte>(i >> 5);
            const std::string name = "of/" + std::to_string(length);
            CHECK(create_at_last(store, name, bytes) == bytes);
            CHECK(read_at_last(store, name) == bytes);
        }
        CHECK_THROWS_AS((void)store.create("too-large", gradsync::Blob(gradsync::largest_blob + 1)), Error);
    }
    SUBCASE("a name that nobody has created is absent") {
        CHECK(store.read("nobody") == std::nullopt);
        CHECK(store.names("nobody").empty());
    }
    SUBCASE("names are listed in ascending order") {
        const std::vector<std::string> all{"gen", "gen/1", "gen/10", "gen/2", "generation", "join/a", "join/a/b/c", "join/a/b/d"};
        for (const std::string& name : all) create_at_last(store, name, words(name));
        for (const std::string& name : all) read_at_last(store, name);
        for (int tries = 0; store.names("").size() != all.size() && tries < 100'000; ++tries) {
        }
        CHECK(store.names("gen/") == std::vector<std::string>{"gen/1", "gen/10", "gen/2"});
        CHECK(store.names("") == all);
        CHECK(store.names("join/a/") == std::vector<std::string>{"join/a/b/c", "join/a/b/d"});
        CHECK(store.names("join/a") == std::vector<std::string>{"join/a", "join/a/b/c", "join/a/b/d"});
        CHECK(store.names("gen/3").empty());
    }
    SUBCASE("what is no name is refused") {
        for (const std::string& name : {std::string(), std::string("/gen"), std::string(".."), std::string("a b"), std::string("a\n"),
                                        std::string("a+b"), std::string("a/../b"), std::string("a//b"), std::string("a/.b"),
                                        std::string("a/"), std::string(201, 'a'), std::string("1"), std::string("a\0b", 3)}) {
            CAPTURE(name);
            CHECK_THROWS_AS((void)store.create(name, words("x")), Error);
            CHECK_THROWS_AS((void)store.read(name), Error);
        }
        CHECK(create_at_last(store, std::string(200, 'a'), words("x")) == words("x"));
    }
    SUBCASE("of threads that create one name all get the bytes of one") {
        std::vector<std::string> got(4);
        std::vector<std::thread> threads;
        for (int writer = 0; writer < 4; ++writer)
            threads.emplace_back([&, writer] {
                auto own = place.open();
                got[static_cast<std::size_t>(writer)] = race(own, writer);
            });
        for (std::thread& thread : threads) thread.join();
        for (const std::string& one : got) CHECK(one == got[0]);
        CHECK(got[0].starts_with("writer "));
    }
}

/// The same for processes, which share no memory.
template <class Place>
void check_store_of_processes(const Place& place) {
    const auto reports = forked(4, [&](int writer) {
        auto own = place.open();
        return race(own, writer);
    });
    for (const Report& report : reports) {
        CHECK(report.clean);
        CHECK(report.text == reports[0].text);
    }
    CHECK(reports[0].text.starts_with("writer "));
}

}  // namespace gradsync_test
