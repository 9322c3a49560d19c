// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/bucket/flat.hpp>

#include <doctest/doctest.h>

#include "support/plans.hpp"

using namespace gradsync_test;
using gradsync::DType;
using gradsync::Flat;
using gradsync::MemorySpace;

TEST_CASE("Flat makes one bucket of parameters of one kind, in order") {
    CHECK(buckets(Flat{}.plan(floats({5, 1, 0, 7}), std::vector<std::size_t>{3, 1, 0, 2})) == Buckets{{3, 1, 0, 2}});
    CHECK(Flat{}.describe() == "Flat");
}

TEST_CASE("Flat makes a bucket for each dtype and memory space, launched as they become complete") {
    const std::vector<gradsync::ParameterInfo> parameters{{4, DType::f32, MemorySpace::host},
                                                          {4, DType::bf16, MemorySpace::host},
                                                          {4, DType::f32, MemorySpace::device},
                                                          {4, DType::bf16, MemorySpace::host},
                                                          {4, DType::f32, MemorySpace::host}};
    CHECK(buckets(Flat{}.plan(parameters, in_order(5))) == Buckets{{2}, {1, 3}, {0, 4}});
}

TEST_CASE("Flat puts parameters that would be cheaper alone into the bucket, too") {
    auto parameters = floats({5, 1000, 7});
    parameters[1].cheaper_alone = true;
    CHECK(buckets(Flat{}.plan(parameters, in_order(3))) == Buckets{{0, 1, 2}});
}

TEST_CASE("Flat makes no bucket without parameters") { CHECK(Flat{}.plan({}, {}).empty()); }
