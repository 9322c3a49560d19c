// SPDX-License-Identifier: BSL-1.0
// expect: gradsync: copy this tensor into contiguous memory first, or hand out a std::span of it
// errors: 1
#include <deque>
#include <vector>

#include <gradsync/core/buffer_view.hpp>

#ifdef GRADSYNC_EXPECT_FAILURE
void f(const std::deque<float>& gradient) { (void)gradsync::const_buffer(gradient); }
#else
void f(const std::vector<float>& gradient) { (void)gradsync::const_buffer(gradient); }
#endif
