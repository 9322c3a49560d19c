// SPDX-License-Identifier: BSL-1.0
// ctest: ALONE LIBRARIES gradsync_device_support gradsync::nccl gradsync_kernels RANKS 1 2 3 4 SERIAL LABELS gpu
// On a device: the Reducer trains there as on the host, with the same bits for every policy. The ranks are processes that share the
// device (see support/gpu_ranks.hpp).
#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/tcp.hpp>
#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/bucket/flat.hpp>
#include <gradsync/bucket/per_parameter.hpp>
#include <gradsync/bucket/size_capped.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/overlap/overlap_backward.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "support/device_training.hpp"
#include "support/gate.hpp"
#include "support/gpu_ranks.hpp"

using namespace gradsync;
using Caps = SizeCappedBuckets;

int prepare_tests() { return gradsync_test::fork_ranks(); }

namespace {

/// What every rank of `comm` has, if it is the same.
std::vector<float> agreed(TcpBackend& host, std::vector<float> own) {
    std::vector<float> first = own;
    host.broadcast(buffer(first), 0).wait();
    CHECK(std::memcmp(first.data(), own.data(), own.size() * sizeof(float)) == 0);
    return own;
}

/// The same training on ranks that are threads of this process: the oracle.
template <class Train>
std::vector<float> on_host(Train&& train) {
    return run_threads(gradsync_test::gpu_ranks().size, [&](ThreadBackend comm) { return train(comm); }).front();
}

template <class Overlap>
void check_that_no_host_waits(NcclBackend& whole, cudaStream_t stream, const AnyBuckets& buckets, const Overlap& overlap,
                              ReducerOptions options) {
    NcclBackend comm = whole.duplicate();
    std::vector<gradsync_test::Numbers<NcclBackend>> weights, gradients;
    for (std::size_t i = 0; i < 20; ++i) {
        weights.emplace_back(5'000 * i + 1, 0.5f);
        gradients.emplace_back(weights.back().size(), static_cast<float>(comm.rank()));
    }
    std::vector<ParameterView> views;
    for (std::size_t i = 0; i < weights.size(); ++i) {
        BufferView gradient = gradients[i].view();
        if (options.gradients == GradientStorage::in_buckets) gradient.data = nullptr;
        views.push_back({.name = "p" + std::to_string(i), .value = weights[i].view(), .gradient = gradient});
    }
    Reducer sync(comm, views, options, buckets, overlap);
    sync.broadcast_parameters();
    const auto step = [&] {
        for (std::size_t i = views.size(); i-- > 0;) sync.mark_ready(i);
        (void)sync.finish();
    };
    step();  // connects the ranks, and takes memory
    cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    gradsync_test::Gate gate(stream);
    step();
    step();
    CHECK(gate.open());
    cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

}  // namespace

TEST_CASE("Reducer over NCCL: in a step the host waits for nothing that the device does") {
    NcclBackend comm(gradsync_test::gpu_ranks().rendezvous, {.timeout = std::chrono::seconds(100)});
    const cuda::Stream stream = cuda::make_stream();
    comm.set_stream(stream.get());
    check_that_no_host_waits(comm, stream.get(), Caps{}, AnyOverlap(OverlapBackward{}), {.gradients = GradientStorage::in_buckets});
    check_that_no_host_waits(comm, stream.get(), Caps{}, AnyOverlap(OverlapBackward{}), {.reduce_dtype = DType::bf16});
    check_that_no_host_waits(comm, stream.get(), Flat{}, AnyOverlap(NoOverlap{}), {});
    check_that_no_host_waits(comm, stream.get(), PerParameter{}, OverlapForward{}, {.gradients = GradientStorage::in_buckets});
}

TEST_CASE("a Reducer over NCCL trains as it does on the host") {
    NcclBackend comm(gradsync_test::gpu_ranks().rendezvous, {.timeout = std::chrono::seconds(100)});
    const cuda::Stream stream = cuda::make_stream();
    comm.set_stream(stream.get());
    for (const auto& [name, options] : gradsync_test::trainings()) {
        CAPTURE(name);
        const auto train = [&](auto backend) { return gradsync_test::train(backend, options, Caps(60'000, 2'000)); };
        const std::vector<float> expected = on_host(train), here = agreed(comm.host(), train(comm.duplicate()));
        CHECK(gradsync_test::distance(here, expected) < (options.reducer.reduce_dtype == DType::bf16 ? 0.03f : 2e-5f));
    }
}

TEST_CASE("a Reducer over NCCL gives the same bits for every policy, and in the next run") {
    NcclBackend comm(gradsync_test::gpu_ranks().rendezvous, {.timeout = std::chrono::seconds(100)});
    const gradsync_test::TrainingOptions options{.clips = true};
    const std::vector<float> expected =
        agreed(comm.host(), gradsync_test::train(comm.duplicate(), options, Flat{}, AnyOverlap(NoOverlap{})));
    const bool again = gradsync_test::train(comm.duplicate(), options, Flat{}, AnyOverlap(NoOverlap{})) == expected;
    CHECK(again);
    // NCCL may add up in another order where sizes differ: with two ranks there is only one.
    const bool per_parameter = gradsync_test::train(comm.duplicate(), options, PerParameter{}) == expected;
    const bool capped = gradsync_test::train(comm.duplicate(), options, Caps(60'000, 2'000), OverlapForward{}) == expected;
    if (comm.size() <= 2) CHECK((per_parameter && capped));
    else MESSAGE("other buckets, other bits: ", !per_parameter, " ", !capped);
}

TEST_CASE("a Reducer over NCCL has its buckets in windows, or in the best memory that there is") {
    NcclBackend comm(gradsync_test::gpu_ranks().rendezvous, {.timeout = std::chrono::seconds(100), .memory = NcclMemory::windows});
    const gradsync_test::TrainingOptions options{.reducer = {.gradients = GradientStorage::in_buckets}, .rebuilds = true};
    const auto train = [&](auto backend) { return gradsync_test::train(backend, options, Caps(60'000, 2'000)); };
    const std::vector<float> expected = on_host(train), here = agreed(comm.host(), train(comm));
    CHECK(gradsync_test::distance(here, expected) < 2e-5f);
    MESSAGE(comm.describe());
}

TEST_CASE("a Reducer over staged buffers gives the bits of the host") {
    TcpBackend host(gradsync_test::gpu_ranks().rendezvous, {.timeout = std::chrono::seconds(100)});
    StagingBackend<TcpBackend> comm(host, {.piece_bytes = 16384});
    for (const auto& [name, options] : gradsync_test::trainings()) {
        CAPTURE(name);
        if (options.clips) continue;  // norms are summed in another order on the device
        const auto train = [&](auto backend) { return gradsync_test::train(backend, options, Caps(60'000, 2'000)); };
        const bool same = agreed(host, train(comm.duplicate())) == on_host(train);
        CHECK(same);
    }
}
