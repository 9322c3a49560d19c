// SPDX-License-Identifier: BSL-1.0
#include <gradsync/compress/power_sgd.hpp>

#include "conformance/compressor.hpp"

TEST_CASE("PowerSgd is a compressor") {
    using gradsync::PowerSgd;
    gradsync_test::check_compressor(PowerSgd{.start_step = 0}, PowerSgd{.start_step = 2}, {PowerSgd{.rank = 0}});
}
TEST_CASE("PowerSgd of a higher rank is a compressor") {
    using gradsync::PowerSgd;
    gradsync_test::check_compressor(PowerSgd{.rank = 3, .start_step = 0}, PowerSgd{.rank = 3, .start_step = 2});
}
