// SPDX-License-Identifier: BSL-1.0
// expect: gradsync: copy this tensor into contiguous memory first, or hand out a std::span of it
#include <vector>

#include <gradsync/core/buffer_view.hpp>

void f() {
#ifdef GRADSYNC_EXPECT_FAILURE
    std::vector<bool> mask(8);
#else
    std::vector<unsigned char> mask(8);
#endif
    (void)gradsync::buffer(mask);
}
