// SPDX-License-Identifier: BSL-1.0
// expect: gradsync: return or pass a std::span.pointer, count. if this tensor's elements are contiguous
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
