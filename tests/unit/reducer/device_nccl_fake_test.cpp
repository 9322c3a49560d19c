// ctest: LIBRARIES gradsync_fake_nccl gradsync_fake_passes TIMEOUT 120
// The Reducer on device memory, over the fakes of support/fake: what it does on ThreadBackend, it does there.
#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/run_threads.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/bucket/flat.hpp>
#include <gradsync/bucket/size_capped.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/overlap/overlap_backward.hpp>

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "support/device_training.hpp"
#include "support/fake/fake.hpp"
#include "support/rank_threads.hpp"

using namespace gradsync;
using gradsync_test::TrainingOptions;
using Caps = SizeCappedBuckets;

namespace {

/// Rank 0's result of `train(comm)` on ranks of each kind; all others must have the same.
template <class Results>
std::vector<float> agreed(const Results& results) {
    for (const auto& other : results) CHECK(other == results.front());
    return results.front();
}

template <class Train>
std::vector<float> on_host(int size, Train&& train) {
    return agreed(run_threads(size, [&](ThreadBackend comm) { return train(comm); }));
}
template <class Train>
std::vector<float> on_devices(int size, Train&& train) {
    std::vector<std::vector<float>> results(static_cast<std::size_t>(size));
    gradsync_test::run_rank_threads(
        size, [](auto& rendezvous) { return NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60)}); },
        [&](NcclBackend comm) {
            const cuda::Stream stream = cuda::make_stream();
            comm.set_stream(stream.get());
            results[static_cast<std::size_t>(comm.rank())] = train(comm);
        });
    CHECK(gradsync_fake::misuses() == 0);
    return agreed(results);
}
template <class Train>
std::vector<float> staged(int size, Train&& train) {
    return agreed(run_threads(size, [&](ThreadBackend host) {
        const cuda::Stream stream = cuda::make_stream();
        StagingBackend<ThreadBackend> comm(host, {.stream = stream.get(), .piece_bytes = 4096});
        return train(comm);
    }));
}

}  // namespace

TEST_CASE("Reducer on devices: it trains as it does on the host") {
    for (const auto& [name, options] : gradsync_test::trainings())
        for (const int size : {1, 3}) {
            CAPTURE(name);
            CAPTURE(size);
            const auto train = [&](auto comm) { return gradsync_test::train<Caps, OverlapBackward>(comm, options, Caps(60'000, 2'000)); };
            const std::vector<float> expected = on_host(size, train);
            CHECK(staged(size, train) == expected);
            const float apart = gradsync_test::distance(on_devices(size, train), expected);
            CHECK(apart < (options.reducer.reduce_dtype == DType::bf16 ? 0.03f : 2e-5f));
        }
}

TEST_CASE("Reducer on devices: the same bits for every policy") {
    for (const bool in_buckets : {false, true}) {
        const TrainingOptions options{.reducer = {.gradients = in_buckets ? GradientStorage::in_buckets : GradientStorage::borrowed}, .clips = true};
        const std::vector<float> expected = on_devices(2, [&](NcclBackend comm) { return gradsync_test::train<Flat, NoOverlap>(comm, options); });
        CHECK(on_devices(2, [&](NcclBackend comm) { return gradsync_test::train<Caps, OverlapBackward>(comm, options, Caps(60'000, 2'000)); }) == expected);
        CHECK(on_devices(2, [&](NcclBackend comm) { return gradsync_test::train<Caps, OverlapForward>(comm, options, Caps(60'000, 2'000)); }) == expected);
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
            findings.check(gradsync_test::read(comm, a.view())[999] == 0.5f && gradsync_test::read(comm, b.view())[1999] == 1.0f, "a wrong mean");
        });
}
