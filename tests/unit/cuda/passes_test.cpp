// SPDX-License-Identifier: BSL-1.0
// ctest: ALONE LIBRARIES gradsync::nccl gradsync_kernels LABELS gpu
// On a device: the passes against the host's kernels.
#include <cstddef>

namespace gradsync_test {
inline constexpr std::size_t counts[] = {0, 1, 3, 7, 8, 255, 1000, 4097, 100'003, 3'000'001}, largest_tensor = 1'000'003;
}

#include "passes_cases.hpp"
#include "support/gpu_ranks.hpp"

int prepare_tests() { return gradsync_test::skip_without_device(); }
