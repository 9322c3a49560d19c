// SPDX-License-Identifier: BSL-1.0
#include <gradsync/core/subject.hpp>

#include <doctest/doctest.h>

using namespace gradsync;

TEST_CASE("Subject: what is not the same has another code, and a text that says what it is") {
    constexpr Subject none, bucket(Subject::Kind::bucket, 1, 3), unit(Subject::Kind::unit, 1, 3);
    static_assert(none.code() == 0);
    static_assert(bucket.code() != unit.code() && bucket.code() != 0);
    static_assert(bucket.code() != Subject(Subject::Kind::bucket, 2, 3).code());
    static_assert(bucket.code() != Subject(Subject::Kind::bucket, 1, 4).code());
    CHECK(Subject::text_of(none.code()) == "nothing in particular");
    CHECK(Subject::text_of(bucket.code()) == "bucket 3 of Reducer #1");
    CHECK(Subject::text_of(unit.code()) == "unit 3 of ShardedParameters #1");
    CHECK(Subject::text_of(Subject(Subject::Kind::bucket, 1023, 524287).code()) == "bucket 524287 of Reducer #1023");
    CHECK(Subject::text_of(Subject(Subject::Kind::bucket, 1024, 524288).code()) == "bucket 0 of Reducer #0");  // beyond that they repeat
}
