// SPDX-License-Identifier: BSL-1.0
// ctest: SANITIZED LIBRARIES gradsync_fake_nccl gradsync_fake_passes TIMEOUT 900 COST 20
// Over a CUDA runtime of our own (support/fake).
#include <exception>

#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>

#include "conformance/backend.hpp"
#include "support/device_memory.hpp"

namespace {

/// Pieces of `piece_bytes`.
template <std::size_t piece_bytes>
struct StagedThreads {
    using Backend = gradsync::StagingBackend<gradsync::ThreadBackend>;
    using Memory = gradsync_test::DeviceMemory;
    static constexpr int largest = 4;
    static constexpr bool one_order = true;

    static bool here(int) { return true; }

    template <class F>
    static void run(int size, std::chrono::nanoseconds limit, F&& f) {
        gradsync::run_threads(
            size,
            [&](gradsync::ThreadBackend host) {
                Backend backend(host, {.piece_bytes = piece_bytes});
                try {
                    f(Backend(backend));
                } catch (const std::exception& error) {  // before its own communicators go, which would only say that it has left
                    backend.fail(error.what());
                    throw;
                } catch (...) {
                    backend.fail("an exception that is no std::exception");
                    throw;
                }
            },
            gradsync::ThreadOptions{.timeout = limit});
    }
};
static_assert(gradsync::Backend<StagedThreads<64>::Backend>);

}  // namespace

TEST_CASE("StagingBackend gives the results of the oracle") { gradsync_test::check_results<StagedThreads<4096>>(); }
TEST_CASE("StagingBackend keeps collectives in flight") { gradsync_test::check_in_flight<StagedThreads<1024>>(); }
TEST_CASE("StagingBackend splits into groups") { gradsync_test::check_groups<StagedThreads<64>>(); }
TEST_CASE("StagingBackend reports failures on every rank") { gradsync_test::check_failures<StagedThreads<16384>>(); }
TEST_CASE("StagingBackend has the abilities that it states") { gradsync_test::check_abilities<StagedThreads<16384>>(); }
