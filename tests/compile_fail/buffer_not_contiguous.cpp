// SPDX-License-Identifier: BSL-1.0
// expect: gradsync: return or pass a std::span.pointer, count. if this tensor's elements are contiguous
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
