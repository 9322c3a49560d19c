// SPDX-License-Identifier: BSL-1.0
// ctest: LIBRARIES gradsync_fake_nccl gradsync_fake_passes
// The Reducer on device memory, over the fakes of support/fake: what it does on ThreadBackend, it does there.
#include <gradsync/backend/faulty.hpp>
#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/bucket/flat.hpp>
#include <gradsync/bucket/optimal.hpp>
#include <gradsync/bucket/per_parameter.hpp>
#include <gradsync/bucket/size_capped.hpp>
#include <gradsync/core/packed.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/overlap/overlap_backward.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "support/device_training.hpp"
#include "support/fake/fake.hpp"
#include "support/ranks_on_fakes.hpp"

using namespace gradsync;
using gradsync_test::on_devices;
using gradsync_test::on_host;
using gradsync_test::staged;
using gradsync_test::TrainingOptions;
using Caps = SizeCappedBuckets;

int prepare_tests() {
    gradsync_fake::connect_late();
    return -1;
}

TEST_CASE("Reducer on devices: it trains as it does on the host") {
    for (const auto& training : gradsync_test::trainings())
        for (const int size : {1, 3}) {
            const TrainingOptions& options = training.second;
            CAPTURE(training.first);
            CAPTURE(size);
            const auto train = [&](auto comm) { return gradsync_test::train<Caps, OverlapBackward>(comm, options, Caps(60'000, 2'000)); };
            const std::vector<float> expected = on_host(size, train);
            CHECK(staged(size, train) == expected);
            for (const NcclMemory memory : {NcclMemory::plain, NcclMemory::windows}) {
                if (memory != NcclMemory::plain && !options.rebuilds) continue;  // it is other buckets that are new
                const float apart = gradsync_test::distance(on_devices(size, train, memory), expected);
                CHECK(apart < (options.reducer.reduce_dtype == DType::bf16 ? 0.03f : 2e-5f));
            }
        }
}

TEST_CASE("Reducer on devices: the same bits for every policy") {
    for (const bool in_buckets : {false, true}) {
        const TrainingOptions options{.reducer = {.gradients = in_buckets ? GradientStorage::in_buckets : GradientStorage::borrowed},
                                      .clips = true};
        const std::vector<float> expected =
            on_devices(2, [&](NcclBackend comm) { return gradsync_test::train<Flat, NoOverlap>(comm, options); });
        CHECK(on_devices(2, [&](NcclBackend comm) {
                  return gradsync_test::train<Caps, OverlapBackward>(comm, options, Caps(60'000, 2'000));
              }) == expected);
        CHECK(on_devices(2, [&](NcclBackend comm) {
                  return gradsync_test::train<Caps, OverlapForward>(comm, options, Caps(60'000, 2'000));
              }) == expected);
    }
}

TEST_CASE("Reducer on devices: a step keeps no host waiting for the device") {
    gradsync_test::Findings findings;
    gradsync_test::run_rank_threads(
        2, [](auto& rendezvous) { return NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60)}); },
        [&](NcclBackend comm) {
            const cuda::Stream stream = cuda::make_stream();
            comm.set_stream(stream.get());
            gradsync_test::Numbers<NcclBackend> a(1000, static_cast<float>(comm.rank())), b(2000, static_cast<float>(comm.rank() * 2));
            std::vector<ParameterView> views{{.name = "a", .gradient = a.view()}, {.name = "b", .gradient = b.view()}};
            Reducer<NcclBackend, Caps, OverlapBackward> sync(comm, views);
            {
                const gradsync_fake::Busy backward(stream.get());  // not over before finish() has returned
                sync.mark_ready(1);
                sync.mark_ready(0);
                sync.finish();
                findings.check(cudaStreamQuery(stream.get()) == cudaErrorNotReady, "the step was over before the backward");
            }
            findings.check(gradsync_test::read(comm, a.view())[999] == 0.5f && gradsync_test::read(comm, b.view())[1999] == 1.0f,
                           "a wrong mean");
        });
}

namespace {

/// Two steps of a Reducer of parameters of 4, 8, 12, ... bytes, marked in an order of this rank's own; the gradients, and the launches of
/// NCCL's that the second step took on all ranks together.
template <class Buckets, class Overlap>
std::pair<std::vector<float>, int> steps(int size, std::size_t group_bytes, Buckets buckets, std::size_t parameters = 10) {
    gradsync_test::Findings findings;
    std::vector<float> result;
    int launches = 0;
    gradsync_test::run_rank_threads(
        size, [&](auto& rendezvous) { return NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60), .group_bytes = group_bytes}); },
        [&](NcclBackend comm) {
            std::vector<gradsync_test::Numbers<NcclBackend>> gradients;
            for (std::size_t i = 0; i < parameters; ++i) gradients.emplace_back(i + 1, 0.0f);
            std::vector<ParameterView> views;
            for (auto& g : gradients) views.push_back({.name = "p" + std::to_string(views.size()), .gradient = g.view()});
            Reducer<NcclBackend, Buckets, Overlap> sync(comm, views, {}, buckets);
            int before = 0;
            for (int step = 0; step < 2; ++step) {
                comm.host().barrier().wait();
                if (comm.rank() == 0) before = gradsync_fake::launches();
                comm.host().barrier().wait();
                for (std::size_t k = 0; k < gradients.size(); ++k) {
                    const std::size_t i = (gradients.size() - 1 - k + static_cast<std::size_t>(comm.rank()) * 3) % gradients.size();
                    gradsync_test::write(comm, gradients[i].view(),
                                         std::vector<float>(i + 1, static_cast<float>(comm.rank() + step) + 0.1f * static_cast<float>(i)));
                    sync.mark_ready(i);
                }
                (void)sync.finish();
                constexpr std::size_t of_a_bucket = std::is_same_v<Overlap, OverlapForward> ? 2 : 1;
                findings.check(sync.statistics().last.collectives == sync.plan().size() * of_a_bucket,
                               "a bucket in a group is no collective");
                cudaStreamSynchronize(comm.stream());
                comm.host().barrier().wait();
            }
            if (comm.rank() != 0) return;
            launches = gradsync_fake::launches() - before;
            for (auto& g : gradients)
                for (const float value : gradsync_test::read(comm, g.view())) result.push_back(value);
        });
    CHECK(gradsync_fake::misuses() == 0);
    return {result, launches};
}

}  // namespace

TEST_CASE("Reducer on devices: small buckets that follow one another leave as one launch, on all ranks alike") {
    for (const int size : {2, 3}) {
        const auto [expected, apart] = steps<PerParameter, OverlapBackward>(size, 0, PerParameter());
        CHECK(apart == size * 10 * 2);  // a mean is two: the weights, the elements
        // Bytes of the buckets in the order of launch: 40 36 32 28 24 20 16 12 8 4.
        struct Case {
            std::size_t bytes;
            int groups;
        };
        for (const Case c : {Case{76, 4}, {60, 5}, {220, 1}, {4, 10}, {1 << 20, 1}}) {
            CAPTURE(c.bytes);
            const auto [result, together] = steps<PerParameter, OverlapBackward>(size, c.bytes, PerParameter());
            CHECK(result == expected);
            CHECK(together == size * c.groups * 2);
            CHECK(steps<PerParameter, NoOverlap>(size, c.bytes, PerParameter()) == std::pair(result, together));
        }
        // Gathers, each a launch without weights, leave in the same groups.
        for (const Case c : {Case{0, 10}, {76, 4}, {1 << 20, 1}})
            CHECK(steps<PerParameter, OverlapForward>(size, c.bytes, PerParameter()) == std::pair(expected, size * c.groups * 3));
        CHECK(steps<Caps, OverlapBackward>(size, 100, Caps(60, 40)).first == expected);
    }
    CHECK(steps<PerParameter, OverlapBackward>(2, 1 << 20, PerParameter(), 100).second == 2 * 4 * 2);  // 32, 32, 32 and 4
    CHECK(steps<PerParameter, OverlapForward>(2, 1 << 20, PerParameter(), 100).second == 2 * 4 * 3);
}

TEST_CASE("Reducer on devices: gathers that leave together are waited for one by one, in any order, and planned anew") {
    gradsync_test::Findings findings;
    gradsync_test::run_rank_threads(
        2, [](auto& rendezvous) { return NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60), .group_bytes = 76}); },
        [&](NcclBackend comm) {
            std::vector<gradsync_test::Numbers<NcclBackend>> gradients;
            std::vector<ParameterView> views;
            for (std::size_t i = 0; i < 10; ++i) gradients.emplace_back(i + 1, 0.0f);
            for (auto& g : gradients) views.push_back({.name = "p" + std::to_string(views.size()), .gradient = g.view()});
            Reducer<NcclBackend, PerParameter, OverlapForward> sync(comm, views);
            for (int step = 0; step < 4; ++step) {
                for (std::size_t k = 0; k < 10; ++k) {
                    const std::size_t i = (k * 7) % 10;  // an order that changes the plan
                    gradsync_test::write(comm, gradients[i].view(),
                                         std::vector<float>(i + 1, static_cast<float>(comm.rank() * 4 + step) + static_cast<float>(i)));
                    sync.mark_ready(i);
                }
                auto averages = sync.finish();
                for (std::size_t k = 0; k < 10; ++k) {
                    const std::size_t i = (step + comm.rank()) % 2 == 0 ? k : (k * 3 + 5) % 10;  // each rank in another
                    averages.acquire(i);
                    const auto values = gradsync_test::read(comm, gradients[i].view());
                    findings.check(values == std::vector<float>(i + 1, static_cast<float>(2 + step) + static_cast<float>(i)),
                                   "step " + std::to_string(step) + ": a wrong mean of p" + std::to_string(i));
                }
                if (step == 1) findings.check(sync.rebuild_buckets(), "the plan has not changed");
            }
        });
    CHECK(gradsync_fake::misuses() == 0);
}

TEST_CASE("Reducer on devices: an exception out of a gather's start leaves none of its group on the device, and ends all ranks") {
    gradsync_test::Findings findings;
    using Stumbling = FaultyBackend<NcclBackend>;
    std::atomic<int> gathers{-1};  // that rank 0 may start yet; -1: all
    const Stumbling::Fault fault = [&](const FaultPoint& at) {
        if (at.rank == 0 && at.operation == "all_gather" && gathers >= 0 && gathers-- == 0)
            throw std::runtime_error("this rank has stumbled");
    };
    gradsync_test::run_rank_threads(
        2, [&](auto& rendezvous) { return Stumbling(NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60)}), fault); },
        [&](Stumbling comm) {
            std::vector<gradsync_test::Numbers<NcclBackend>> gradients;
            std::vector<ParameterView> views;
            for (std::size_t i = 0; i < 4; ++i) gradients.emplace_back(i + 1, static_cast<float>(comm.rank()));
            for (auto& g : gradients) views.push_back({.name = "p" + std::to_string(views.size()), .gradient = g.view()});
            std::string text;
            int peer = -1;
            {
                Reducer<Stumbling, PerParameter, OverlapForward> sync(comm, views);
                for (std::size_t i = 4; i-- > 0;) sync.mark_ready(i);
                if (comm.rank() == 0) gathers = 2;
                comm.host().barrier().wait();
                const int before = gradsync_fake::launches();
                comm.host().barrier().wait();
                try {
                    if (comm.rank() == 0) (void)sync.finish();
                    else comm.host().barrier().wait();  // where nothing is launched meanwhile
                } catch (const Error& error) {
                    text = error.what();
                    peer = error.context().peer;
                } catch (const std::runtime_error& error) {
                    text = error.what();
                }
                findings.check(gradsync_fake::launches() == before, "a part of the gathers was launched");
            }
            if (comm.rank() == 0) findings.check(text == "this rank has stumbled", text);
            else findings.check(peer == 0 && text.find("rank 0 failed: this rank has stumbled") != std::string::npos, text);
        });
    CHECK(gradsync_fake::misuses() == 0);
}

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

TEST_CASE("Reducer on devices: what fails in a group ends the step on all ranks, and is named") {
    gradsync_test::Findings findings;
    gradsync_test::run_rank_threads(
        2, [](auto& rendezvous) { return NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60)}); },
        [&](NcclBackend comm) {
            gradsync_test::Numbers<NcclBackend> a(1000, 1), b(2000, 2);
            std::vector<ParameterView> views{{.name = "a", .gradient = a.view()}, {.name = "b", .gradient = b.view()}};
            Reducer<NcclBackend, PerParameter, OverlapBackward> sync(comm, views);
            sync.mark_ready(1);
            comm.host().barrier().wait();
            if (comm.rank() == 0) gradsync_fake::refuse_next("ncclGroupEnd", ncclInvalidUsage);
            const auto error = gradsync_test::error_of([&] {
                comm.host().barrier().wait();  // may hear of it already
                sync.mark_ready(0);
                sync.finish();
                cudaStreamSynchronize(comm.stream());
                comm.barrier().wait();  // where the other rank's failure was not known yet
            });
            findings.check(error && error->errc() == Errc::device_failed, error ? error->what() : "nothing was thrown");
            findings.check(error && gradsync_test::mentions(*error, "all_reduce(mean, f32, 2000 elements) in a group with the next 1"),
                           error ? error->what() : "");
        });
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
