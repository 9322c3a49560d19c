// SPDX-License-Identifier: BSL-1.0
// ctest: ALONE LIBRARIES gradsync_fake_nccl gradsync_fake_kernels COMPILE_OPTIONS -O2 -Wno-unknown-pragmas -fsanitize=alignment -fsanitize-undefined-trap-on-error NOT_WITH address thread
// Runs the same cases without a device: g++ compiles passes.cu, and fibers take the place of threads. A misaligned load or store ends the
// program.
#include <cstddef>

namespace gradsync_test {
inline constexpr std::size_t counts[] = {0, 1, 3, 7, 8, 255, 1000, 4097, 40'003}, largest_tensor = 9'001;
}

#include "passes_cases.hpp"
#include "support/fake/fake.hpp"
#include "support/fake/kernels.hpp"  // last but for the kernels: it has macros

#include <gradsync/cuda/passes.cu>
