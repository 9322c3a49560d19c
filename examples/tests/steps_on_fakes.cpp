// SPDX-License-Identifier: BSL-1.0
// The synchronisers of the trainer over the fakes, whose device can be held up.

#include <gradsync/backend/nccl.hpp>
#include <gradsync/gradsync.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "../cuda/ops_cuda.hpp"
#include "../make_synchroniser.hpp"
#include "support/fake/fake.hpp"
#include "support/rank_threads.hpp"

using namespace gradsync_train;

namespace {

void step(Synchroniser& sync, const Parameters& parameters, const Units& units, const CudaOps& ops) {
    for (std::size_t u = 0; u < units.size(); ++u) {
        sync.enter(u);
        sync.leave(u);
    }
    sync.begin_backward(0);
    for (std::size_t u = units.size(); u-- > 0;) {
        sync.enter(u);
        for (std::size_t i : units[u]) {
            ops.fill(parameters[i].count, 1.0f, sync.gradient(i));
            sync.ready(i);
        }
        sync.leave(u);
    }
    sync.end_backward();
    sync.step(0.1);
}

void check(const gs::NcclBackend& comm, const CudaOps& ops, const Options& o) {
    Parameters parameters{1};
    for (const char* name : {"a", "b", "c"}) parameters.add(name, {40, 25}, 1.0);
    const Units units{{0}, {1}, {2}};
    const auto sync = make_synchroniser(comm, o, parameters, units, nullptr, ops);
    step(*sync, parameters, units, ops);  // connects the ranks, and takes memory
    ops.finish();
    {
        const gradsync_fake::Busy before(ops.stream());
        step(*sync, parameters, units, ops);
        step(*sync, parameters, units, ops);
        if (cudaStreamQuery(ops.stream()) != cudaErrorNotReady) throw std::logic_error("--shard " + o.shard + ": the host has waited");
    }
    ops.finish();
}

}  // namespace

TEST_CASE("--device cuda --backend nccl: a step that clips keeps no host waiting") {
    for (const char* shard : {"none", "optimizer", "gradients", "parameters"})
        for (const char* type : {"f32", "bf16"}) {
            Options o;
            o.device = "cuda";
            o.backend = "nccl";
            o.shard = shard;
            o.reduce_dtype = type;
            o.buckets = "per-parameter";
            const bool borrowed = o.reduce_dtype != "f32" && (o.shard == "none" || o.shard == "optimizer");
            o.gradients = borrowed ? "borrowed" : "in-buckets";
            o.micro_batches = 2;
            gradsync_test::run_rank_threads(
                2, [](auto& rendezvous) { return gs::NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60)}); },
                [&](gs::NcclBackend comm) {
                    const CudaOps ops{Precision::f32};
                    comm.set_stream(ops.stream());
                    check(comm, ops, o);
                });
        }
    CHECK(gradsync_fake::misuses() == 0);
}
