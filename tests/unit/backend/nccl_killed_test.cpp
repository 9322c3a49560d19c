// SPDX-License-Identifier: BSL-1.0
// ctest: ALONE LIBRARIES gradsync::nccl gradsync_kernels SERIAL LABELS gpu COMPILE_OPTIONS -O1
// On a device: a rank is killed in the middle of a training loop; the others are told which, within the limit.
#include <gradsync/backend/nccl.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <csignal>
#include <string>

#include "support/device_memory.hpp"
#include "support/forked.hpp"
#include "support/gpu_ranks.hpp"

int prepare_tests() { return gradsync_test::skip_without_device(); }

TEST_CASE("NcclBackend: a rank that is killed is named on the others") {
    using namespace std::chrono_literals;
    const std::uint16_t port = gradsync_test::free_port();
    const auto reports = gradsync_test::forked(3, [&](int rank) -> std::string {
        gradsync_test::look_like_a_host(rank);
        gradsync::TcpRendezvous rendezvous({.rank = rank, .size = 3, .port = port});
        gradsync::NcclBackend comm(rendezvous, {.timeout = 60s});
        gradsync_test::DeviceMemory memory(std::vector<std::byte>(4'000'000));
        const auto begin = std::chrono::steady_clock::now();
        try {
            for (int step = 0;; ++step) {
                comm.all_reduce({memory.data(), 1'000'000, gradsync::DType::f32, gradsync::MemorySpace::device}, gradsync::ReduceOp::mean)
                    .wait();
                if (rank == 1 && step == 20) ::kill(::getpid(), SIGKILL);
                if (step == 10'000) return "nothing was thrown";
            }
        } catch (const gradsync::Error& error) {
            const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
            if (error.context().peer != 1) return error.what();
            return "told after " + std::to_string(seconds) + " s: " + error.what();
        }
    });
    MESSAGE(reports[0].text);
    CHECK(reports[1].signal == SIGKILL);
    for (const int rank : {0, 2}) {
        CAPTURE(reports[static_cast<std::size_t>(rank)].text);
        CHECK(reports[static_cast<std::size_t>(rank)].says("told after"));
        CHECK(reports[static_cast<std::size_t>(rank)].says("the process of rank 1 died"));
        CHECK(reports[static_cast<std::size_t>(rank)].clean);
    }
}
