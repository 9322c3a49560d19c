// SPDX-License-Identifier: BSL-1.0
// expect: gradsync: describe this type by specialising gradsync::buffer_traits or parameter_traits, or pass a contiguous range
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
