// SPDX-License-Identifier: BSL-1.0
// ctest: SANITIZED LIBRARIES gradsync_device_support gradsync_fake_nccl gradsync_fake_passes
// The Reducer's gradients in device memory, over the fakes of support/fake: their types, where they lie, when they are ready.
#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/bucket/per_parameter.hpp>
#include <gradsync/core/packed.hpp>
#include <gradsync/planning/optimal_buckets.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "support/device_training.hpp"
#include "support/fake/fake.hpp"
#include "support/rank_threads.hpp"

using namespace gradsync;

TEST_CASE("Reducer on devices: gradients travel in 8 bits where devices can add them up, else no rank begins") {
    struct Expectation {
        int version, capability;
        std::string refusal;  ///< "" where it works
    };
    for (const Expectation& expected : {Expectation{NCCL_VERSION_CODE, 90, ""},
                                        {NCCL_VERSION_CODE, 80, "rank 0 has a device of compute capability 8.0"},
                                        {NCCL_VERSION(2, 23, 4), 90, "rank 0 has, or was compiled for, NCCL 2.23.4"}}) {
        if (expected.refusal.empty() && NCCL_VERSION_CODE < NCCL_VERSION(2, 24, 3)) continue;
        CAPTURE(expected.refusal);
        gradsync_fake::pretend(expected.version, true);
        gradsync_fake::be_of_capability(expected.capability);
        gradsync_test::Findings findings;
        gradsync_test::run_rank_threads(
            2, [](auto& rendezvous) { return NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60)}); },
            [&](NcclBackend comm) {
                const bool is_first = comm.rank() == 0;
                gradsync_test::Numbers<NcclBackend> a(1000, is_first ? 1.0f : 3.0f), b(2000, is_first ? -4.0f : 0.5f);
                std::vector<ParameterView> views{{.name = "a", .gradient = a.view()}, {.name = "b", .gradient = b.view()}};
                gradsync_test::DeviceMemory bytes(std::vector<std::byte>(100));
                std::vector<ParameterView> mixed = views;  // other types travel, too, and would be on their way first
                const BufferView in_8_bits{bytes.data(), 100, DType::f8e5m2, MemorySpace::device};
                mixed.insert(mixed.begin(), ParameterView{.name = "bytes", .gradient = in_8_bits});
                const auto step = [&](std::vector<ParameterView>& parameters, ReducerOptions options) {
                    Reducer<NcclBackend, PerParameter, OverlapBackward> sync(comm, parameters, options);
                    for (std::size_t i = parameters.size(); i-- > 0;) sync.mark_ready(i);
                    sync.finish();
                };
                const auto check_means = [&] {
                    const auto of_a = gradsync_test::read(comm, a.view()), of_b = gradsync_test::read(comm, b.view());
                    findings.check(of_a == std::vector<float>(1000, 2.0f), "a wrong mean");
                    findings.check(of_b == std::vector<float>(2000, -1.75f), "a wrong mean");
                };
                if (expected.refusal.empty()) {
                    step(views, {.reduce_dtype = DType::f8e5m2});
                    check_means();
                    step(mixed, {});
                    return;
                }
                for (const bool all_in_8_bits : {true, false}) {
                    const int before = gradsync_fake::launches();
                    comm.host().barrier().wait();
                    ReducerOptions options;
                    if (all_in_8_bits) options.reduce_dtype = DType::f8e5m2;
                    const auto error = gradsync_test::error_of([&] { step(all_in_8_bits ? views : mixed, options); });
                    findings.check(error && error->errc() == Errc::invalid_argument, error ? error->what() : "nothing was thrown");
                    for (const std::string& words : {std::string("Reducer: NCCL adds up f8e5m2 from 2.24.3 on"), expected.refusal})
                        findings.check(error && gradsync_test::mentions(*error, words), error ? error->what() : "");
                    comm.host().barrier().wait();
                    findings.check(gradsync_fake::launches() == before, "something was launched");
                    comm.host().barrier().wait();
                }
                step(views, {});  // with the same backend
                check_means();
            });
        CHECK(gradsync_fake::misuses() == 0);
    }
    gradsync_fake::pretend(NCCL_VERSION_CODE, true);
    gradsync_fake::be_of_capability(90);
}

TEST_CASE("Reducer on devices: gradients that lie side by side by chance may move; those of one arena are a bucket where they are") {
    gradsync_test::Findings findings;
    run_threads(2, [&](ThreadBackend host) {
        using Staged = StagingBackend<ThreadBackend>;
        Staged comm(host);
        gradsync_test::Numbers<Staged> memory(300, 1), elsewhere(100, 1);
        std::vector<ParameterView> views;
        for (std::size_t i = 0; i < 3; ++i) views.push_back({.gradient = memory.view().subview(100 * i, 100)});
        {
            Reducer sync(comm, views);
            const auto error = gradsync_test::error_of([&] { sync.rebind_gradient(1, elsewhere.view()); });
            findings.check(!error, error ? error->what() : "");
            gradsync_test::write(comm, elsewhere.view(), std::vector<float>(100, static_cast<float>(comm.rank())));
            for (std::size_t i = 3; i-- > 0;) sync.mark_ready(i);
            sync.finish();
            findings.check(gradsync_test::read(comm, elsewhere.view()) == std::vector<float>(100, 0.5f), "another mean");
        }
        Reducer sync(comm, packed(BufferView(), memory.view(), {{"a", {100}}, {"b", {200}}}));
        findings.check(sync.bytes() == 0, "an arena is copied");
        const auto error = gradsync_test::error_of([&] { sync.rebind_gradient(0, elsewhere.view()); });
        findings.check(error && gradsync_test::mentions(*error, "is part of an arena in device memory"), error ? error->what() : "none");
    });
}

TEST_CASE("Reducer on devices: gradients become ready when the device comes by, and buckets are planned by that") {
    gradsync_test::Findings findings;
    gradsync_test::run_rank_threads(
        2, [](auto& rendezvous) { return NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60)}); },
        [&](NcclBackend comm) {
            const cuda::Stream stream = cuda::make_stream();
            comm.set_stream(stream.get());
            gradsync_test::Numbers<NcclBackend> a(1000, 1), b(2000, 2), c(10, 3);
            std::vector<ParameterView> views{{.gradient = a.view()}, {.gradient = b.view()}, {.gradient = c.view()}};
            Reducer sync(comm, views, OptimalBuckets({.fixed = 1e-3, .per_byte = 1e-9}));
            sync.record_order(2);
            for (int step = 0; step < 2; ++step) {
                sync.mark_ready(2);
                // A backward; the host goes on at once.
                gradsync_fake::enqueue(stream.get(), [] { std::this_thread::sleep_for(std::chrono::milliseconds(40)); });
                sync.mark_ready(1);
                sync.mark_ready(0);
                sync.finish();
            }
            (void)sync.rebuild_buckets();
            const auto& seconds = sync.statistics().ready_seconds;
            findings.check(seconds.size() == 3 && seconds[2] == 0 && seconds[1] >= 0.04 && seconds[0] >= seconds[1], "times of the host");
        });
}

TEST_CASE("Reducer on devices: check_writes is refused, and GRADSYNC_CHECKS has no effect") {
    ::setenv("GRADSYNC_CHECKS", "1", 1);
    gradsync_test::Findings findings;
    run_threads(2, [&](ThreadBackend host) {
        StagingBackend<ThreadBackend> comm(host);
        gradsync_test::Numbers<StagingBackend<ThreadBackend>> a(1000, 1);
        std::vector<ParameterView> views{{.name = "a", .gradient = a.view()}};
        const auto error = gradsync_test::error_of([&] { Reducer(comm, views, ReducerOptions{.check_writes = true}); });
        findings.check(error && gradsync_test::mentions(*error, "check_writes reads gradients in host memory only"),
                       error ? error->what() : "");
        Reducer sync(comm, views);
        sync.mark_ready(0);
        sync.finish();
    });
    ::unsetenv("GRADSYNC_CHECKS");
}
