// SPDX-License-Identifier: BSL-1.0
// NcclBackend's collectives against NCCL's own functions.
//
//     bench_nccl [--seconds=S] [--rounds=N] [--gib] [Google Benchmark's flags]
//
// Ranks are processes with a device each, told who they are by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
// (torchrun --no-python sets them, srun others); without these it is one rank, and the figures are what a call costs.
// All get the same flags; rank 0 reports. Exit code 77: there is no device.
//
// Benchmarks are named WHO/COLLECTIVE/DTYPE/ranks:N/bytes:B, WHO nccl (NcclBackend) or nccl_library, which take turns.
// Calls of a turn are put on a stream one after another, as nccl-tests does it; times are for one, medians, of the
// slowest rank. Counters: bytes, algbw and busbw as in nccl-tests; nccl_library_ratio, NCCL's own time over this one's;
// time_min and time_max in seconds; samples.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdio>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <gradsync/backend/nccl.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/kernel/host_buffer.hpp>

#include "buffers.hpp"
#include "collectives.hpp"
#include "flags.hpp"
#include "nccl_contestants.hpp"
#include "reporting.hpp"
#include "shared_contests.hpp"

namespace {

using namespace bench;
using gradsync::DType;

ContestOptions contest_options{.pin = false, .warm_ups = 2};

/// What all cases use. The bare communicator is made when the first case is run: that takes seconds.
struct Devices {
    gradsync::NcclBackend comm;
    std::optional<BareNccl> bare = {};
};

struct Case {
    std::string collective;
    DType dtype = DType::f32;
    std::size_t bytes = 0;

    std::string name(int ranks) const {
        return collective + "/" + std::string(gradsync::name_of(dtype)) + "/ranks:" + std::to_string(ranks) +
               "/bytes:" + std::to_string(bytes);
    }
};

/// Throws unless it turns buffers full of 1, 2, ... into their sum.
void check_sum(DeviceContestant& contestant, const OnDevice& what, int rank, int ranks, const std::string& who) {
    const gradsync::kernel::HostBuffer host(what.bytes());
    const auto copy = [&](void* to, const void* from, cudaMemcpyKind kind) {
        gradsync::cuda::check(cudaMemcpy(to, from, what.bytes(), kind), "cudaMemcpy");
        gradsync::cuda::check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");  // what it left to do no other stream waits for
    };
    fill(host.data(), what.bytes(), what.dtype, static_cast<float>(rank + 1));
    copy(what.data, host.data(), cudaMemcpyHostToDevice);
    contestant.meet(rank);
    contestant.run(rank, 1);
    copy(host.data(), what.data, cudaMemcpyDeviceToHost);
    check_filled(host.data(), what.bytes(), what.dtype, sum_of_ranks(ranks), who);
    gradsync::cuda::check(cudaMemset(what.data, 0, what.bytes()), "cudaMemset");
    gradsync::cuda::check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

std::vector<Summary> measure(Devices& devices, const Case& c, const std::vector<std::string>& names) {
    gradsync::NcclBackend& comm = devices.comm;
    if (!devices.bare) devices.bare.emplace(comm);
    const std::size_t per_rank = c.bytes / size_of(c.dtype) / static_cast<std::size_t>(comm.size());
    const auto memory = comm.allocate(c.bytes);
    const OnDevice what{c.collective, c.dtype, memory.data(), per_rank * static_cast<std::size_t>(comm.size())};
    OverNcclBackend own(comm, what);
    NcclLibrary library(comm, *devices.bare, what);
    DeviceContestant* const all[] = {&own, &library};
    if (c.collective == "all_reduce")
        for (std::size_t i = 0; i < names.size(); ++i) check_sum(*all[i], what, comm.rank(), comm.size(), names[i]);

    const auto slowest = [&](double seconds) {
        comm.host().all_reduce(gradsync::buffer(std::span(&seconds, 1)), gradsync::ReduceOp::max).wait();
        return seconds;
    };
    Contestant* const contestants[] = {&own, &library};
    std::vector<Summary> summaries;
    for (const Samples& samples : take_part(comm.rank(), contestants, contest_options, slowest))
        summaries.push_back(summarise(samples.seconds));
    return summaries;
}

SharedContests<std::vector<Summary>> shared_contests;

void add(Devices& devices, const Case& c) {
    const std::vector<std::string> names{"nccl", "nccl_library"};
    const int ranks = devices.comm.size();
    for (std::size_t i = 0; i < names.size(); ++i)
        add_benchmark(names[i] + "/" + c.name(ranks), benchmark::kMicrosecond, [=, &devices](benchmark::State& state) {
            const auto run = [&] { return measure(devices, c, names); };
            const std::vector<Summary> of = shared_contests.take(c.name(ranks), names, names[i], run);
            report(state, of[i], 0);
            const double bandwidth = static_cast<double>(c.bytes) / of[i].median;
            state.counters["bytes"] = static_cast<double>(c.bytes);
            state.counters["algbw"] = bandwidth;
            state.counters["busbw"] = bandwidth * bus_factor(c.collective, ranks);
            if (i == 0) state.counters["nccl_library_ratio"] = of[1].median / of[0].median;
        });
}

void add_all(Devices& devices, bool gib) {
    constexpr std::size_t mib = std::size_t{1} << 20;
    std::vector<std::size_t> sizes{4096, 65536, mib, 10 * mib, 25 * mib, 100 * mib};
    if (gib) sizes.push_back(1024 * mib);
    for (std::size_t bytes : sizes)
        for (const char* collective : {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"})
            add(devices, {collective, DType::f32, bytes});
    for (DType dtype : {DType::bf16, DType::f16, DType::f64})
        for (std::size_t bytes : {std::size_t{4096}, mib, 25 * mib}) add(devices, {"all_reduce", dtype, bytes});
}

}  // namespace

int main(int argc, char** argv) {
    Flags flags(argc, argv);
    const bool gib = flags.take("gib");
    flags.take(contest_options);
    int count = 0;
    if (const cudaError_t code = cudaGetDeviceCount(&count); code != cudaSuccess || count == 0) {
        std::printf("skipped: no CUDA device (%s)\n", code == cudaSuccess ? "there are 0" : cudaGetErrorString(code));
        return 77;
    }
    try {
        Devices devices{gradsync::NcclBackend::from_environment()};
        const gradsync::cuda::Stream stream = gradsync::cuda::make_stream();
        devices.comm.set_stream(stream.get());
        add_all(devices, gib);
        return run_benchmarks(argc, argv, devices.comm.rank() == 0);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
        return 1;
    }
}
