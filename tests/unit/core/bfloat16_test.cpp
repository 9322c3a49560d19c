// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/storage_floats.hpp>

#include "half_test.hpp"

TEST_CASE("BFloat16 is the upper half of binary32") {
    gradsync_test::check_half<gradsync::BFloat16>(gradsync_test::HalfOracle::bfloat16());
}

TEST_CASE("BFloat16 has the largest, smallest and rounded numbers of its format") {
    using gradsync::BFloat16;
    CHECK(BFloat16(1.0f).bits() == 0x3f80u);
    CHECK(BFloat16(0x1.fep127f).bits() == 0x7f7fu);      // the largest
    CHECK(BFloat16(0x1.fffffep127f).bits() == 0x7f80u);  // the largest float: infinity
    CHECK(BFloat16(0x1p-133f).bits() == 0x0001u);
    CHECK(BFloat16(0x1p-134f).bits() == 0x0000u);
}
