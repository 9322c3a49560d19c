// SPDX-License-Identifier: BSL-1.0
// expect: gradsync: return or pass a std::span.pointer, count. if this tensor's elements are contiguous
// errors: 1
#include <deque>
#include <vector>

#include <gradsync/core/buffer_view.hpp>

#ifdef GRADSYNC_EXPECT_FAILURE
void f(const std::deque<float>& gradient) { (void)gradsync::const_buffer(gradient); }
#else
void f(const std::vector<float>& gradient) { (void)gradsync::const_buffer(gradient); }
#endif
