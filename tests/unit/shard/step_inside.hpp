// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include "support/sharding.hpp"

/// A training with any stage, which says how many collectives its steps needed.

namespace gradsync_test {

/// Some of these span several blocks of a step.
inline const std::vector<std::size_t> inside_sizes = {700, 1, 30000, 0, 5, 1025, 2, 40000};

struct How {
    Training training = {.counts = inside_sizes, .steps = 5};
    gradsync::ParameterStorage parameters = gradsync::ParameterStorage::in_buckets;
    bool norms = false;     ///< asked for in steps 1 and 3
    bool weighs = false;    ///< ranks have different weights, and the last one has no batch in step 2
    bool discards = false;  ///< steps 2 and 4
    bool thaws = false;     ///< parameters 2 and 5 are trained from step 2 on, and buckets are planned anew after it
};

/// The weights of one rank after its training, and the number of collectives of a bucket in each step.
struct Trained {
    std::vector<Bytes> weights;
    std::vector<std::size_t> collectives;
};

template <class Stage, class B>
Trained train_as(B comm, const How& how, Stage stage) {
    const Training& t = how.training;
    const std::size_t later[] = {2, 5};
    auto model = initial_tensors(t.counts, t.dtype);
    std::vector<gradsync::ParameterView> views;
    for (std::size_t i = 0; i < model.size(); ++i) {
        views.push_back(gradsync::parameter_view(model[i]));
        views.back().name = "p" + std::to_string(i);
        views.back().may_be_empty = true;
        views.back().requires_grad = !how.thaws || (i != later[0] && i != later[1]);
    }
    gradsync::ShardedOptimizer sharded(comm, views, AdamW{{0.01, 0.02}},
                                       gradsync::ShardingOptions{.reducer = t.reducer, .parameters = how.parameters}, stage,
                                       gradsync::SizeCappedBuckets(150000));
    sharded.broadcast_parameters();
    Trained result;
    for (int s = 0; s < t.steps; ++s) {
        if (how.thaws && s == 2) sharded.unfreeze(later);
        const bool has_batch = !(how.weighs && s == 2 && comm.rank() == comm.size() - 1 && comm.size() > 1);
        if (how.weighs) {
            if (!sharded.begin_step(has_batch)) break;
            if (has_batch) sharded.set_weight(1.0 + comm.rank());
        }
        for (int m = 0; has_batch && m < t.micro_batches; ++m) {
            std::optional<gradsync::NoSync> guard;
            if (m + 1 < t.micro_batches) guard.emplace(sharded.no_sync());
            for (std::size_t i = views.size(); i-- > 0;) {
                if (!sharded.parameters()[i].requires_grad) continue;
                write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), t.batch(s, m), i, m > 0);
                sharded.mark_ready(i);
            }
        }
        sharded.finish();
        if (how.discards && s % 2 == 0 && s > 0) {
            sharded.discard();
            continue;
        }
        double scale = 1.0 / t.micro_batches;
        if (how.norms && s % 2 == 1) scale = gradsync::clip_factor(sharded.gradient_norm(), 0.5);
        sharded.step(scale);
        result.collectives.push_back(sharded.statistics().last.collectives / sharded.plan().size());
        if (how.thaws && s == 2) (void)sharded.rebuild_buckets();
    }
    result.weights = weights(sharded);
    return result;
}

}  // namespace gradsync_test
