// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/error.hpp>

#include <doctest/doctest.h>

#include <ostream>
#include <stdexcept>
#include <string>

namespace gs = gradsync;

TEST_CASE("Error carries a code, a sentence and where it happened") {
    const gs::Error error(gs::Errc::timeout, "all_reduce: rank 3 did not arrive within 10 s",
                          {.operation = "all_reduce", .rank = 1, .peer = 3, .bucket = 2, .parameter = "head.weight"});
    CHECK(error.errc() == gs::Errc::timeout);
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

TEST_CASE("Error is caught as std::runtime_error, and names its bucket once") {
    try {
        gs::Error error(gs::Errc::peer_failed, "rank 2 failed");
        error.name_bucket(3);
        error.name_bucket(4);
        throw error;
    } catch (const std::runtime_error& e) {
        CHECK(std::string(e.what()) == "rank 2 failed (it was bucket 3)");
    }
}
