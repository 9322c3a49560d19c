// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/shard_range.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <initializer_list>

using gradsync::ElementRange;
using gradsync::shard_range;

static_assert(shard_range(10, 4, 0) == ElementRange{0, 3});
static_assert(shard_range(10, 4, 3) == ElementRange{9, 10});

TEST_CASE("shard_range: shards cover every element once, in rank order, and only the last ones are short") {
    for (std::size_t count : {0u, 1u, 2u, 3u, 7u, 8u, 9u, 63u, 64u, 65u, 1000u, 65537u})
        for (int size = 1; size <= 70; ++size) {
            CAPTURE(count);
            CAPTURE(size);
            const std::size_t each = shard_range(count, size, 0).size();
            std::size_t next = 0;
            bool ended = false;
            bool good = each * static_cast<std::size_t>(size) >= count;
            for (int rank = 0; rank < size; ++rank) {
                const ElementRange range = shard_range(count, size, rank);
                good = good && range.first == next && range.last >= range.first && range.size() <= each;
                good = good && (!ended || range.size() == 0);  // after a short shard all are empty
                ended = ended || range.size() < each;
                next = range.last;
            }
            if (!good || next != count) CHECK_MESSAGE(false, "shards do not tile the elements");
        }
}

TEST_CASE("shard_range gives some ranks nothing if there are fewer elements than ranks") {
    CHECK(shard_range(3, 4, 2) == ElementRange{2, 3});
    CHECK(shard_range(3, 4, 3) == ElementRange{3, 3});
    CHECK(shard_range(0, 4, 0) == ElementRange{0, 0});
    CHECK(shard_range(5, 4, 2) == ElementRange{4, 5});  // torch.chunk's rule: 2, 2, 1, 0
    CHECK(shard_range(5, 4, 3) == ElementRange{5, 5});
}
