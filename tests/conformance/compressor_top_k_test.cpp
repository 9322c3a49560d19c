// SPDX-License-Identifier: BSL-1.0
#include <gradsync/compress/top_k.hpp>

#include "conformance/compressor.hpp"

TEST_CASE("TopK is a compressor") {
    using gradsync::TopK;
    gradsync_test::check_compressor(TopK{.density = 0.05}, TopK{.density = 0.05, .start_step = 2});
}

TEST_CASE("TopK of so little that gaps between parameters are more is a compressor") {
    using gradsync::TopK;
    gradsync_test::check_compressor(TopK{.density = 0.005}, TopK{.density = 0.005, .start_step = 2});
}
