// SPDX-License-Identifier: BSL-1.0
#pragma once

// The names that fragments of the documentation use: a trainer's own things.

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <span>
#include <vector>

#include <gradsync/compress/power_sgd.hpp>
#include <gradsync/elastic/elastic_job.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/interop/pointer.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/checkpoint.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

namespace gs = gradsync;

struct Batch {};

struct Model {
    std::vector<gs::ParameterView> parameters();
    float forward(const Batch&);
    template <class Ready>
    void backward(const Batch&, Ready&& ready) {
        ready(std::size_t{0});
    }
    void step();
};

struct Sgd {
    std::size_t state_count() const { return 0; }
    void begin_step() {}
    void step(const gs::OptimizerSlice<float>&) const {}
};

/// What each fragment is handed, and may hide by names of its own.
// clang-format off: it takes the names for products
#define GRADSYNC_FRAGMENT_NAMES                                                                                                   \
    [[maybe_unused]] gs::ThreadBackend comm, [[maybe_unused]] Model &model, [[maybe_unused]] gs::Reducer<gs::ThreadBackend>&sync, \
        [[maybe_unused]] gs::ShardedOptimizer<gs::ThreadBackend, Sgd, gs::Zero2>&sharded,                                         \
        [[maybe_unused]] const std::vector<Batch>&batches, [[maybe_unused]] const Batch &batch, [[maybe_unused]] float *weights,  \
        [[maybe_unused]] float *gradient, [[maybe_unused]] std::size_t count
// clang-format on
