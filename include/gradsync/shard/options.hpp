// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "../engine/options.hpp"

namespace gradsync::inline v0_2 {

/// The stages of ZeRO (Rajbhandari et al., arXiv 1910.02054) say which data are sharded.

/// Stage 1 shards the optimizer state and the master weights. Gradients are whole, and live where `ReducerOptions::gradients` says;
/// micro-batches add up there under `no_sync()`.
struct Zero1 {
    static constexpr bool shards_gradients = false;
};

/// Stage 2 shards the gradients too. A bucket has memory only while it is filled and reduced. This rank's shard stays, in f32 (f64 for
/// f64); further micro-batches are reduced and added to it.
struct Zero2 {
    static constexpr bool shards_gradients = true;
};

/// The memory of the weights that the model computes with.
enum class ParameterStorage : std::uint8_t {
    borrowed,    ///< in the trainer's memory: the gathered weights are copied there
    in_buckets,  ///< in `parameter_value(i)`: no copy. Values given at construction are copied in
};

struct ShardingOptions {
    /// As for a Reducer. `gradients` applies to stage 1; stage 2 always pools them.
    ReducerOptions reducer = {};
    ParameterStorage parameters = ParameterStorage::borrowed;
};

/// Bytes of library memory per rank, gaps between parameters included.
struct ShardMemory {
    std::size_t parameters = 0;      ///< weights that the model computes with
    std::size_t gradients = 0;       ///< buckets and shards of gradients
    std::size_t master_weights = 0;  ///< those kept in addition to the weights
    std::size_t optimizer_state = 0;
};

}  // namespace gradsync::inline v0_2
