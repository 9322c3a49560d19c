// SPDX-License-Identifier: BSL-1.0
// expect: gradsync: pass a mutable range: the library writes the result into it
// errors: 1
#include <vector>

#include <gradsync/core/buffer_view.hpp>

void f(const std::vector<float>& gradient) {
#ifdef GRADSYNC_EXPECT_FAILURE
    (void)gradsync::buffer(gradient);
#else
    (void)gradsync::const_buffer(gradient);
#endif
}
