// SPDX-License-Identifier: BSL-1.0
// expect: gradsync: return or pass a std::span.pointer, count. of this tensor's elements, or specialise gradsync::buffer_traits
// errors: 1
#include <span>

#include <gradsync/core/buffer_view.hpp>

struct Tensor {
    float* data;
    std::size_t size;
};

void f(Tensor gradient) {
#ifdef GRADSYNC_EXPECT_FAILURE
    (void)gradsync::buffer(gradient);
#else
    (void)gradsync::buffer(std::span(gradient.data, gradient.size));
#endif
}
