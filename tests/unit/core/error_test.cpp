// SPDX-License-Identifier: BSL-1.0
#include <gradsync/core/error.hpp>

#include <doctest/doctest.h>

#include <ostream>
#include <set>
#include <string>
#include <system_error>

namespace gs = gradsync;

TEST_CASE("Error carries a code, a sentence and where it happened") {
    const gs::Error error(gs::Errc::timeout, "all_reduce: rank 3 did not arrive within 10 s",
                          {.operation = "all_reduce", .rank = 1, .peer = 3, .bucket = 2, .parameter = "head.weight"});
    CHECK(error.errc() == gs::Errc::timeout);
    CHECK(error.code() == gs::Errc::timeout);
    CHECK(std::string(error.what()).find("rank 3 did not arrive") != std::string::npos);
    CHECK(error.context().operation == "all_reduce");
    CHECK(error.context().rank == 1);
    CHECK(error.context().peer == 3);
    CHECK(error.context().bucket == 2);
    CHECK(error.context().parameter == "head.weight");
}

TEST_CASE("Error: a context that does not apply is empty") {
    const gs::Error error(gs::Errc::invalid_argument, "no");
    CHECK(error.context().operation.empty());
    CHECK(error.context().rank == -1);
    CHECK(error.context().peer == -1);
    CHECK(error.context().bucket == -1);
    CHECK(error.context().parameter.empty());
}

TEST_CASE("Error is caught as std::system_error, and its code compares with Errc") {
    try {
        throw gs::Error(gs::Errc::peer_failed, "rank 2 failed");
    } catch (const std::system_error& e) {
        CHECK(e.code() == gs::Errc::peer_failed);
        CHECK(e.code() != gs::Errc::timeout);
        CHECK(e.code().category() == gs::error_category());
        CHECK(std::string(e.code().category().name()) == "gradsync");
    }
}

TEST_CASE("Errc: every code has a message of its own") {
    std::set<std::string> messages;
    constexpr int last = static_cast<int>(gs::Errc::storage);
    for (int code = 1; code <= last; ++code) messages.insert(gs::error_category().message(code));
    CHECK(messages.size() == static_cast<std::size_t>(last));
    CHECK(messages.count(gs::error_category().message(0)) == 0);
}
