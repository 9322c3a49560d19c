// SPDX-License-Identifier: BSL-1.0
// The device passes as g++ compiles them: fibers take the place of threads. A misaligned load or store ends the program.
#include <cmath>
#include <cstddef>

#include "fake.hpp"
#include "kernels.hpp"  // last but for the kernels: it has macros

#include <gradsync/cuda/passes.cu>
