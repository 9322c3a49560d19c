// SPDX-License-Identifier: BSL-1.0
// expect: gradsync: copy this tensor into contiguous memory first, or hand out a std::span of it
// errors: 1
#include <list>
#include <vector>

#include <gradsync/core/buffer_view.hpp>

void f() {
#ifdef GRADSYNC_EXPECT_FAILURE
    std::list<float> gradient(8);
#else
    std::vector<float> gradient(8);
#endif
    (void)gradsync::buffer(gradient);
}
