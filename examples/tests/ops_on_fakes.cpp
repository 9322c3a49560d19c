// SPDX-License-Identifier: BSL-1.0
// The kernels as g++ compiles them, for the tests that have no device.
#include "support/fake/kernels.hpp"

#include "../cuda/ops_cuda.cu"  // NOLINT: the very file
