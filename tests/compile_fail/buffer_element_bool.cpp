// SPDX-License-Identifier: BSL-1.0
// expect: gradsync: use float, double, Float16, BFloat16, Float8E4M3, Float8E5M2, or an integer of 1, 4 or 8 bytes
// errors: 1
#include <array>

#include <gradsync/core/buffer_view.hpp>

void f() {
#ifdef GRADSYNC_EXPECT_FAILURE
    std::array<bool, 8> gradient{};
#else
    std::array<unsigned char, 8> gradient{};
#endif
    (void)gradsync::buffer(gradient);
}
