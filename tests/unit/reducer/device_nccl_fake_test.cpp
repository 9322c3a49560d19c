// SPDX-License-Identifier: BSL-1.0
// ctest: SANITIZED LIBRARIES gradsync_device_support gradsync_fake_nccl gradsync_fake_passes
// The Reducer on device memory, over the fakes of support/fake: what it does on ThreadBackend, it does there.
#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/bucket/flat.hpp>
#include <gradsync/bucket/size_capped.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/overlap/overlap_backward.hpp>

#include <doctest/doctest.h>

#include <chrono>
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

TEST_CASE("a Reducer on devices trains as it does on the host") {
    for (const auto& training : gradsync_test::trainings())
        for (const int size : {1, 3}) {
            const TrainingOptions& options = training.second;
            CAPTURE(training.first);
            CAPTURE(size);
            const auto train = [&](auto comm) { return gradsync_test::train(comm, options, Caps(60'000, 2'000)); };
            const std::vector<float> expected = on_host(size, train);
            CHECK(staged(size, train) == expected);
            for (const NcclMemory memory : {NcclMemory::plain, NcclMemory::windows}) {
                if (memory != NcclMemory::plain && !options.rebuilds) continue;  // it is other buckets that are new
                const float apart = gradsync_test::distance(on_devices(size, train, memory), expected);
                CHECK(apart < (options.reducer.reduce_dtype == DType::bf16 ? 0.03f : 2e-5f));
            }
        }
}

TEST_CASE("a Reducer on devices gives the same bits for every policy") {
    for (const bool in_buckets : {false, true}) {
        const TrainingOptions options{.reducer = {.gradients = in_buckets ? GradientStorage::in_buckets : GradientStorage::borrowed},
                                      .clips = true};
        const std::vector<float> expected =
            on_devices(2, [&](NcclBackend comm) { return gradsync_test::train(comm, options, Flat{}, AnyOverlap(NoOverlap{})); });
        CHECK(on_devices(2, [&](NcclBackend comm) { return gradsync_test::train(comm, options, Caps(60'000, 2'000)); }) == expected);
        CHECK(on_devices(2, [&](NcclBackend comm) { return gradsync_test::train(comm, options, Caps(60'000, 2'000), OverlapForward{}); }) ==
              expected);
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
