// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "options.hpp"  // of the example trainer, as are all names of gradsync_train

namespace bench {

namespace trainer = gradsync_train;

/// A way of training together, in the flags of the example trainer.
struct Strategy {
    std::string name;
    std::string buckets = "capped";
    double bucket_mib = 25;
    std::string overlap = "backward";
    std::string shard = "none";
    bool shares_weights = false;  ///< one set for all ranks, which are threads
    bool watched = false;         ///< a Timeline keeps what happens
    bool meets = false;           ///< independent, but for a barrier after the backward

    bool synchronises() const { return name != independent && !meets; }
    bool steps_inside() const { return overlap == "step"; }
    bool goes_with(std::string_view backend) const { return !shares_weights || backend == "threads"; }
    /// Weights are still gathered when a step has ended: in a contest, while others take theirs.
    bool gathers_between_steps() const { return overlap == "forward" || shard == "parameters"; }
    /// What its steps are compared with, pair by pair.
    std::string_view reference() const { return watched ? unwatched : independent; }

    static constexpr std::string_view independent = "independent";  ///< each rank for itself: what no other can beat
    static constexpr std::string_view unwatched = "buckets_25MB";   ///< the same steps as `timeline`
};

inline const std::vector<Strategy>& strategies() {
    static const std::vector<Strategy> all{
        {.name = std::string(Strategy::independent)},
        {.name = "meeting", .meets = true},
        {.name = "naive", .buckets = "per-parameter", .overlap = "none"},
        {.name = "flat", .buckets = "flat", .overlap = "none"},
        {.name = "overlap_per_parameter", .buckets = "per-parameter"},
        {.name = "buckets_1MB", .bucket_mib = 1},
        {.name = "buckets_10MB", .bucket_mib = 10},
        {.name = "buckets_25MB", .bucket_mib = 25},
        {.name = "buckets_100MB", .bucket_mib = 100},
        {.name = "buckets_1000MB", .bucket_mib = 1000},
        {.name = "optimal", .buckets = "optimal"},
        {.name = "forward", .overlap = "forward"},
        {.name = "zero1", .shard = "optimizer"},
        {.name = "fused", .overlap = "step", .shard = "optimizer"},
        {.name = "fused_shared", .overlap = "step", .shard = "optimizer", .shares_weights = true},
        {.name = "zero2", .shard = "gradients"},
        {.name = "zero3", .shard = "parameters"},
        {.name = "timeline", .watched = true},
    };
    return all;
}

inline const Strategy& strategy(std::string_view name) {
    for (const Strategy& each : strategies())
        if (each.name == name) return each;
    throw trainer::UsageError("no strategy is called " + std::string(name));
}

/// transformer: 3.3 M parameters, context 128, 8 sequences a step and rank. mlp: 8.2 M parameters, 64 rows.
inline const std::vector<std::string>& models() {
    static const std::vector<std::string> all{"transformer", "mlp"};
    return all;
}

/// Gradients are not clipped: that is a pass, and where they are sharded a collective, of its own.
inline trainer::Options options_for(const std::string& model, const Strategy& strategy) {
    trainer::Options o;
    o.model = model;
    if (model == "mlp") {
        o.context = 16, o.d_model = 49, o.hidden = {2048, 2048, 1024}, o.micro_batch = 64;
    } else {
        o.context = 128, o.d_model = 256, o.micro_batch = 8;
    }
    o.clip = 0;
    o.buckets = strategy.buckets;
    o.bucket_mib = strategy.bucket_mib;
    o.overlap = strategy.overlap;
    o.shard = strategy.shard;
    o.shared_weights = strategy.shares_weights;
    return o;
}

}  // namespace bench
