// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/collective_tag.hpp>

#include <doctest/doctest.h>

using namespace gradsync;

TEST_CASE("CollectiveTags that differ have different codes, and a text that says what they are") {
    constexpr CollectiveTag none, bucket(CollectiveTag::Kind::bucket, 1, 3), unit(CollectiveTag::Kind::unit, 1, 3);
    static_assert(none.code() == 0);
    static_assert(bucket.code() != unit.code() && bucket.code() != 0);
    static_assert(bucket.code() != CollectiveTag(CollectiveTag::Kind::bucket, 2, 3).code());
    static_assert(bucket.code() != CollectiveTag(CollectiveTag::Kind::bucket, 1, 4).code());
    CHECK(CollectiveTag::text_of(none.code()) ==
          "a call outside of buckets (of your own, average, broadcast_parameters, begin_step, gradient_norm, save_shards)");
    CHECK(CollectiveTag::text_of(bucket.code()) == "bucket 3 of Reducer #1");
    CHECK(CollectiveTag::text_of(unit.code()) == "unit 3 of ShardedParameters #1");
    CHECK(CollectiveTag::text_of(CollectiveTag(CollectiveTag::Kind::bucket, 1023, 524287).code()) == "bucket 524287 of Reducer #1023");
    CHECK(CollectiveTag::text_of(CollectiveTag(CollectiveTag::Kind::bucket, 1024, 524288).code()) ==
          "bucket 0 of Reducer #0");  // beyond that they repeat
}
