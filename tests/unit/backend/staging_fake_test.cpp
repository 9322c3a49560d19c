// SPDX-License-Identifier: BSL-1.0
// ctest: SANITIZED LIBRARIES gradsync_fake_nccl gradsync_fake_passes
// StagingBackend beside a stream that stalls, over the CUDA runtime of support/fake; the conformance suite shows the rest.
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/fake/fake.hpp"

namespace gs = gradsync;

namespace {

/// What each of 2 ranks says of an all-reduce. Rank 0's compute stream stalls, and goes on once its backend is gone.
std::vector<std::string> beside_a_stall(bool waits) {
    return gs::run_threads(
        2,
        [&](gs::ThreadBackend host) -> std::string {
            const gs::cuda::Stream stream = gs::cuda::make_stream();
            const gs::cuda::DeviceMemory memory(4096);
            std::optional<gradsync_fake::Busy> stalled;
            if (host.rank() == 0) stalled.emplace(stream.get());
            gs::StagingBackend<gs::ThreadBackend> whole(host, {.stream = stream.get()});
            auto comm = whole.split(0, -host.rank());  // errors number ranks as `host` does
            comm.set_timeout(std::chrono::milliseconds(host.rank() == 0 ? 300 : 30'000));
            auto work = comm.all_reduce({memory.data(), 1024, gs::DType::f32, gs::MemorySpace::device}, gs::ReduceOp::sum);
            try {
                if (waits || host.rank() == 1) work.wait();
                while (!work.test()) {
                }
            } catch (const gs::Error& error) {
                return (error.errc() == gs::Errc::timeout ? "timeout: " : "other: ") + std::string(error.what());
            }
            return "";
        },
        {.timeout = std::chrono::seconds(30)});
}

}  // namespace

TEST_CASE("StagingBackend: a stream that stalls is named at the time limit, and neither waits nor destructors wait longer for it") {
    for (const bool waits : {true, false}) {
        const auto said = beside_a_stall(waits);
        CAPTURE(said[0]);
        CAPTURE(said[1]);
        CHECK(said[0].starts_with("timeout: rank 0: all_reduce(sum, f32, 1024 elements)"));
        CHECK(said[0].find(": the earlier work on the compute stream did not end within ") != std::string::npos);
        CHECK(said[1].find("rank 0 failed: all_reduce") != std::string::npos);
    }
}

TEST_CASE("StagingBackend: once a rank has failed, a collective is refused when it is started") {
    const auto refused = gs::run_threads(
        2,
        [](gs::ThreadBackend host) {
            const gs::cuda::DeviceMemory memory(4096);
            gs::StagingBackend<gs::ThreadBackend> comm(host);
            if (host.rank() == 0) comm.fail("it gave up");
            try {
                comm.barrier().wait();
            } catch (const gs::Error&) {
            }
            try {
                auto work = comm.all_reduce({memory.data(), 1024, gs::DType::f32, gs::MemorySpace::device}, gs::ReduceOp::sum);
            } catch (const gs::Error& error) {
                return std::string(error.what()).find("it gave up") != std::string::npos;
            }
            return false;
        },
        {.timeout = std::chrono::seconds(30)});
    for (const bool by_this_rank : refused) CHECK(by_this_rank);
}

TEST_CASE("StagingBackend: after fail() nothing is copied to a buffer, also of pieces that the host has reduced") {
    for (int attempt = 0; attempt < 50; ++attempt) {
        const auto unchanged = gs::run_threads(
            2,
            [&](gs::ThreadBackend host) {
                constexpr std::size_t bytes = 64 << 10;
                const gs::cuda::DeviceMemory memory(bytes);
                std::vector<float> before(bytes / sizeof(float), 1.0f);
                std::memcpy(memory.data(), before.data(), bytes);
                gs::StagingBackend<gs::ThreadBackend> comm(host, {.piece_bytes = 1024});
                auto work = comm.all_reduce({memory.data(), before.size(), gs::DType::f32, gs::MemorySpace::device}, gs::ReduceOp::sum);
                std::this_thread::sleep_for(std::chrono::microseconds(40 * attempt));
                comm.fail("it gave up");
                std::memcpy(before.data(), memory.data(), bytes);
                std::this_thread::sleep_for(std::chrono::milliseconds(2));
                const bool same = std::memcmp(before.data(), memory.data(), bytes) == 0;
                try {
                    work.wait();
                } catch (const gs::Error&) {
                }
                return same;
            },
            {.timeout = std::chrono::seconds(30)});
        CAPTURE(attempt);
        for (const bool same : unchanged) CHECK(same);
    }
}

TEST_CASE("StagingBackend: a handle that was moved from says so") {
    gs::run_threads(1, [](gs::ThreadBackend host) {
        gs::StagingBackend<gs::ThreadBackend> comm(host);
        const auto other = std::move(comm);
        CHECK_THROWS_WITH_AS(comm.set_stream(nullptr), doctest::Contains("was moved from"), gs::Error);
        CHECK_THROWS_WITH_AS((void)comm.stream(), doctest::Contains("was moved from"), gs::Error);
        CHECK_THROWS_WITH_AS((void)comm.passes(), doctest::Contains("was moved from"), gs::Error);
        CHECK(other.stream() == nullptr);
    });
}
