// SPDX-License-Identifier: BSL-1.0
// A program for devices as g++ compiles it, without one: on one rank, as it is, and on three that are threads.
#include "support/fake/kernels.hpp"

#define main as_it_is
#include GRADSYNC_PROGRAM  // a .cu file of examples/cuda with launches over the fakes
#undef main

#include <atomic>
#include <thread>

#include "support/ports.hpp"

int main() {
    if (as_it_is() != 0) return 1;
    const std::uint16_t port = gradsync_test::free_port();
    std::atomic<int> right{0};
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 3; ++rank)
        ranks.emplace_back([&right, rank, port] {  // an exception ends the program
            gs::TcpRendezvous rendezvous({.rank = rank, .size = 3, .port = port});
            right += std::abs(train(gs::NcclBackend(rendezvous)) - 2) < 0.01f ? 1 : 0;
        });
    for (std::thread& rank : ranks) rank.join();
    return right == 3 ? 0 : 1;
}
