// SPDX-License-Identifier: BSL-1.0
// ctest: ALONE LIBRARIES gradsync_fake_nccl gradsync_fake_kernels gradsync_fake_passes_on_fibers NOT_WITH address thread
// Runs the same cases without a device, on the passes of support/fake/passes_on_fibers.cpp.
#include <cstddef>

namespace gradsync_test {
inline constexpr std::size_t counts[] = {0, 1, 3, 7, 8, 255, 1000, 4097, 40'003}, largest_tensor = 9'001;
}

#include "passes_cases.hpp"
