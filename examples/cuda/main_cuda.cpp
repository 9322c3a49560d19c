// SPDX-License-Identifier: BSL-1.0
// gradsync_train --device cuda: over NCCL the ranks are processes, one for each device, and this is one of them; over
// threads they are this program's, and their gradients travel through the host.

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <span>
#include <string>

#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/gradsync.hpp>

#include "../place_in_job.hpp"
#include "../run_rank.hpp"
#include "device.hpp"
#include "train_cuda.hpp"

namespace gradsync_train {

namespace {

void expect_device() {
    if (const std::string missing = why_no_device(); !missing.empty())
        throw UsageError("--device cuda: " + missing + "; leave it out to train on the CPU");
}

/// Ranks beyond the number of devices share them.
void take_device(int rank) {
    int devices = 1;
    gs::cuda::check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    gs::cuda::check(cudaSetDevice(rank % devices), "cudaSetDevice");
}

CudaOps operations_of(const Options& o) { return CudaOps{o.precision == "f32" ? Precision::f32 : Precision::bf16}; }

Results train_on_device(gs::ThreadBackend host, const Job& job) {
    take_device(host.rank());
    const CudaOps ops = operations_of(job.options);
    gs::StagingBackend<gs::ThreadBackend> comm(host, {.stream = ops.stream()});
    try {
        return run_rank(ops, comm, job);
    } catch (const std::exception& error) {
        comm.fail(error.what());
        throw;
    }
}

void expect_one_checkpoint(gs::NcclBackend& comm, const Job& job) {
    std::uint64_t own[] = {job.checkpoint ? job.checkpoint->digest() : 0};
    std::uint64_t first[] = {own[0]};
    comm.host().broadcast(gs::buffer(std::span(first)), 0).wait();
    if (own[0] == first[0]) return;
    throw UsageError("--resume: rank " + std::to_string(comm.rank()) + " finds another checkpoint in " + job.options.checkpoint.string() +
                     " than rank 0; copy one of them to all machines");
}

int run(const gs::Job& place, const Job& job) {
    std::optional<CudaOps> ops;
    std::optional<gs::NcclBackend> comm;
    const bool speaks = place.rank == 0;
    const int code = exit_code_of([&] {
        expect_device();
        take_device(place.local_rank);
        // Gathers of weights have a communicator of their own. A rank without a micro-batch starts collectives in another order. If NCCL
        // connected ranks at their first collective, two ranks could wait for each other in different communicators.
        if (job.options.shard == "parameters") {
            ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
            ::setenv("NCCL_RUNTIME_CONNECT", "0", 0);
        }
        ops.emplace(operations_of(job.options));
        gs::TcpRendezvous rendezvous(place, {.timeout = time_limit(job.options)});
        comm.emplace(rendezvous, gs::NcclOptions{.timeout = time_limit(job.options), .stream = ops->stream()});
        expect_one_checkpoint(*comm, job);
    });
    if (code != 0) return code;
    try {
        const Results results = run_rank(*ops, *comm, job);
        comm->set_timeout(std::chrono::hours(24));  // for what rank 0 alone does now
        const int exit_code = speaks ? exit_code_of([&] { present(job, results); }) : 0;
        comm->host().barrier().wait();
        return exit_code;
    } catch (...) {
        const Ending ending = ending_of_current_exception();
        comm->fail(ending.text);
        const std::string name = "rank " + std::to_string(place.rank) + ": ";  // the library's errors have it already
        std::fprintf(stderr, "gradsync_train: %s%s\n", ending.text.starts_with(name) ? "" : name.c_str(), ending.text.c_str());
        return ending.code;
    }
}

}  // namespace

void train_on_devices(const Job& job) {
    expect_device();
    const auto by_rank = gs::run_threads(
        job.options.ranks, [&](gs::ThreadBackend host) { return train_on_device(host, job); },
        gs::ThreadOptions{.timeout = time_limit(job.options)});
    present(job, by_rank[0]);
}

int main_over_nccl(int argc, char** argv) {
    gs::Job place;
    std::optional<Job> job;
    const int code = exit_code_of([&] {
        place = place_in_job("--backend nccl");
        job = prepare(parse_options(argc, argv, place.size), place.rank == 0);
    });
    return code != 0 || !job ? code : run(place, *job);
}

}  // namespace gradsync_train
