// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../engine/options.hpp"

namespace gradsync::inline v0_2 {

/// What is split over the ranks besides the optimizer's state, in ZeRO's stages (Rajbhandari et al., arXiv 1910.02054).

/// Stage 1: the optimizer's state and the master weights. Gradients are whole while they are computed, wherever
/// `ReducerOptions::gradients` says; micro-batches are added up there, under `no_sync()`.
struct Zero1 {
    static constexpr bool shards_gradients = false;
};

/// Stage 2: gradients too. A bucket has memory only while it is filled and reduced; what stays is this rank's shard, in f32 (f64
/// for f64), to which further micro-batches are reduced and added.
struct Zero2 {
    static constexpr bool shards_gradients = true;
};

/// Where the weights live that the model computes with.
enum class ParameterStorage : std::uint8_t {
    borrowed,    ///< in the trainer's own memory: they are gathered into buckets and copied out
    in_buckets,  ///< in `parameter_value(i)`: no copy. The values that ParameterViews have at construction are copied in
};

struct ShardingOptions {
    /// As for a Reducer. `gradients` is for stage 1; later stages pool them.
    ReducerOptions reducer = {};
    ParameterStorage parameters = ParameterStorage::borrowed;
};

/// Bytes of one rank that belong to the library, gaps between parameters included.
struct ShardMemory {
    std::size_t parameters = 0;      ///< weights to compute with
    std::size_t gradients = 0;       ///< buckets and shards of gradients
    std::size_t master_weights = 0;  ///< that are not the weights themselves
    std::size_t optimizer_state = 0;
};

}  // namespace gradsync::inline v0_2
