// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/storage_floats.hpp>

#include "half_test.hpp"

TEST_CASE("Float16 is IEEE 754 binary16") { gradsync_test::check_half<gradsync::Float16>(gradsync_test::HalfOracle::float16()); }

TEST_CASE("Float16 has the largest, smallest and rounded numbers of its format") {
    using gradsync::Float16;
    CHECK(Float16(1.0f).bits() == 0x3c00u);
    CHECK(Float16(65504.0f).bits() == 0x7bffu);
    CHECK(Float16(65519.996f).bits() == 0x7bffu);
    CHECK(Float16(65520.0f).bits() == 0x7c00u);  // halfway to 2^16: a tie, and the even neighbour is infinity
    CHECK(Float16(0x1p-24f).bits() == 0x0001u);
    CHECK(Float16(0x1p-25f).bits() == 0x0000u);
    CHECK(Float16(0x1.000002p-25f).bits() == 0x0001u);
}
