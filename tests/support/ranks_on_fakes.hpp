// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <vector>

#include "support/fake/fake.hpp"
#include "support/rank_threads.hpp"

namespace gradsync_test {

/// Rank 0's result of `train(comm)` on ranks of each kind; all others must have the same.
template <class Results>
std::vector<float> agreed(const Results& results) {
    for (const auto& other : results) CHECK(other == results.front());
    return results.front();
}

template <class Train>
std::vector<float> on_host(int size, Train&& train) {
    return agreed(gradsync::run_threads(size, [&](gradsync::ThreadBackend comm) { return train(comm); }));
}
template <class Train>
std::vector<float> on_devices(int size, Train&& train, gradsync::NcclMemory memory = gradsync::NcclMemory::plain) {
    std::vector<std::vector<float>> results(static_cast<std::size_t>(size));
    run_rank_threads(
        size, [&](auto& rendezvous) { return gradsync::NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60), .memory = memory}); },
        [&](gradsync::NcclBackend comm) {
            const gradsync::cuda::Stream stream = gradsync::cuda::make_stream();
            comm.set_stream(stream.get());
            results[static_cast<std::size_t>(comm.rank())] = train(comm);
        });
    CHECK(gradsync_fake::misuses() == 0);
    return agreed(results);
}
template <class Train>
std::vector<float> staged(int size, Train&& train) {
    return agreed(gradsync::run_threads(size, [&](gradsync::ThreadBackend host) {
        const gradsync::cuda::Stream stream = gradsync::cuda::make_stream();
        gradsync::StagingBackend<gradsync::ThreadBackend> comm(host, {.stream = stream.get(), .piece_bytes = 4096});
        return train(comm);
    }));
}

}  // namespace gradsync_test
