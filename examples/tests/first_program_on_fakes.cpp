// SPDX-License-Identifier: BSL-1.0
// The first program as g++ compiles it, without a device: on one rank, as it is, and on three that are threads.
#include "support/fake/kernels.hpp"

#define main as_it_is
#include "first_program.cpp"  // examples/cuda/first_program.cu with launches over the fakes
#undef main

#include <atomic>

#include "support/rank_threads.hpp"

int main() {
    if (as_it_is() != 0) return 1;
    std::atomic<int> right{0};
    gradsync_test::run_rank_threads(
        3, [](auto& rendezvous) { return gs::NcclBackend(rendezvous); },
        [&](gs::NcclBackend comm) { right += std::abs(train(comm) - 2) < 0.01f ? 1 : 0; });
    return right == 3 ? 0 : 1;
}
