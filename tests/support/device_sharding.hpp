// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <filesystem>
#include <functional>
#include <vector>

#include <gradsync/backend/nccl.hpp>

#include "support/device_training.hpp"

/// Some steps of a made-up sharded training, on a backend of host or of device memory. They are compiled once, in support/device/, for the
/// backends that tests use.

namespace gradsync_test {

struct ShardedCase {
    const char* name;
    int stage = 1;
    gradsync::DType dtype = gradsync::DType::f32;  ///< of weights and gradients
    gradsync::OptionalDType reduce_dtype = {};
    bool in_buckets = false;  ///< weights, and the gradients of stage 1
    bool accumulates = false, clips = false, rebuilds = false, discards = false, skips = false, forward = false, reshards = true;
    int per_group = 0;  ///< ranks that share a state; 0: all

    /// NCCL rounds after every addition.
    float tolerance() const { return dtype == gradsync::DType::bf16 || reduce_dtype ? 0.05f : 2e-3f; }
};

inline std::vector<ShardedCase> sharded_cases() {
    using gradsync::DType;
    return {
        {.name = "stage 1"},
        {.name = "stage 1, in buckets, clipped", .in_buckets = true, .clips = true},
        {.name = "stage 1, bf16", .dtype = DType::bf16, .in_buckets = true},
        {.name = "stage 1, micro-batches, rebuilt", .accumulates = true, .rebuilds = true},
        {.name = "stage 1, weights arrive in the forward", .in_buckets = true, .forward = true},
        {.name = "stage 1, unused parameters", .skips = true},
        {.name = "stage 2, clipped", .stage = 2, .clips = true},
        {.name = "stage 2, bf16, micro-batches", .stage = 2, .dtype = DType::bf16, .in_buckets = true, .accumulates = true},
        {.name = "stage 2, a step discarded, rebuilt", .stage = 2, .rebuilds = true, .discards = true},
        {.name = "stage 2, bf16 on the way, micro-batches", .stage = 2, .reduce_dtype = DType::bf16, .accumulates = true},
        {.name = "stage 3", .stage = 3},
        {.name = "stage 3, bf16, clipped", .stage = 3, .dtype = DType::bf16, .clips = true},
        {.name = "stage 3, micro-batches, kept weights", .stage = 3, .accumulates = true, .reshards = false},
        {.name = "stage 3, bf16 on the way, clipped", .stage = 3, .reduce_dtype = DType::bf16, .clips = true},
        {.name = "stage 1, in groups", .in_buckets = true, .per_group = 2},
        {.name = "stage 3, in groups, clipped", .stage = 3, .clips = true, .per_group = 2},
    };
}

/// All state and all weights after some steps, and the norms if they are asked for. With `saves` it saves shards there after half of the
/// steps; with `loads` it goes on from there.
template <gradsync::Backend B>
std::vector<float> sharded_training(B world, const ShardedCase& what, std::filesystem::path saves = {}, std::filesystem::path loads = {});

/// Calls `held(what, steps)` for each stage; it calls `steps()` while the device is held up, and checks that it was to the end.
void check_that_sharding_keeps_no_host(gradsync::NcclBackend& comm, cudaStream_t stream,
                                       const std::function<void(const char* what, const std::function<void()>& steps)>& held);

}  // namespace gradsync_test
