// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/bucket/size_capped.hpp>

#include "conformance/bucket_policy.hpp"

using gradsync::SizeCappedBuckets;

TEST_CASE("SizeCappedBuckets is a bucket policy, with its defaults") {
    gradsync_test::check_bucket_policy(
        SizeCappedBuckets{},
        {.cap = [](std::size_t k) { return k == 0 ? std::size_t{1} << 20 : std::size_t{25} << 20; }, .spares_copies = true});
}

TEST_CASE("SizeCappedBuckets is a bucket policy, with small caps") {
    gradsync_test::check_bucket_policy(SizeCappedBuckets(4096, 512),
                                       {.cap = [](std::size_t k) -> std::size_t { return k == 0 ? 512 : 4096; }, .spares_copies = true},
                                       {SizeCappedBuckets(4096, 511), SizeCappedBuckets(4097, 512)});
    gradsync_test::check_bucket_policy(SizeCappedBuckets(1), {.cap = [](std::size_t) -> std::size_t { return 1; }, .spares_copies = true});
}

TEST_CASE("SizeCappedBuckets is a bucket policy, with a list of caps") {
    gradsync_test::check_bucket_policy(
        SizeCappedBuckets::with_caps({1000, 100'000, 10'000}),
        {.cap = [](std::size_t k) -> std::size_t { return k == 0   ? 1000
                                                          : k == 1 ? 100'000
                                                                   : 10'000; }, .spares_copies = true},
        {SizeCappedBuckets::with_caps({1000, 100'001, 10'000}), SizeCappedBuckets::with_caps({1001, 100'000, 10'000}),
         SizeCappedBuckets::with_caps({1000, 100'000, 10'001}), SizeCappedBuckets::with_caps({1000, 100'000}),
         SizeCappedBuckets::with_caps({1000, 100'000, 10'000, 1000})});
}
