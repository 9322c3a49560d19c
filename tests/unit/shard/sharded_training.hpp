// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include "support/sharding.hpp"

/// What the tests of this folder train with shards: a whole training, and one backward. Each is compared with the oracle of
/// support/sharding.hpp.

namespace gradsync_test {

/// Trains as `t` says. The norms of all steps go to `norms`.
template <class Sharded>
void train_sharded(Sharded& sharded, const Training& t, std::vector<double>* norms = nullptr) {
    const int rank = sharded.backend().rank();
    const std::size_t count = sharded.parameters().size();
    for (int s = 0; s < t.steps; ++s) {
        for (std::size_t i = 0; i < count; ++i) sharded.wait_parameter(i);  // the forward
        for (int m = 0; m < t.micro_batches; ++m) {
            std::optional<decltype(sharded.no_sync())> guard;
            const bool pooled = Sharded::stage_pools;
            if (!pooled && m + 1 < t.micro_batches) guard.emplace(sharded.no_sync());
            for (std::size_t i = count; i-- > 0;) {
                write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), rank, t.batch(s, m), i, m > 0 && !pooled);
                sharded.mark_ready(i);
            }
            if (pooled) sharded.finish();
        }
        if (!Sharded::stage_pools) sharded.finish();
        const double micro = Sharded::stage_pools ? 1 : t.micro_batches;  // stage 1 holds their sum
        const double norm = sharded.gradient_norm() / micro;
        if (norms != nullptr && rank == 0) norms->push_back(norm);
        sharded.step((t.max_norm > 0 ? gradsync::clip_factor(norm, t.max_norm) : 1.0) / micro);
    }
    sharded.flush();
}

/// Trains on `size` ranks, and says what differs from the training of the oracle: weights or norms. "" if nothing does.
template <class Stage, class Buckets, class Overlap>
std::string difference_of_stage(int size, const Training& t, gradsync::ParameterStorage parameters, Buckets buckets = {},
                                Overlap overlap = {}) {
    std::vector<double> expected_norms, norms;
    const std::vector<Bytes> expected = weights_of_whole(size, t, AdamW{{0.01, 0.02}}, &expected_norms);
    std::string found = findings(size, [&](gradsync::ThreadBackend comm, Finding& finding) {
        auto model = initial_tensors(t.counts, t.dtype);
        gradsync::ShardedOptimizer<gradsync::ThreadBackend, AdamW, Stage, Buckets, Overlap> sharded(
            comm, model, AdamW{{0.01, 0.02}}, {.reducer = t.reducer, .parameters = parameters}, buckets, overlap);
        train_sharded(sharded, t, &norms);
        finding.check(first_difference(expected, weights(sharded)).empty(), first_difference(expected, weights(sharded)) + " differs");
    });
    if (found.empty() && norms != expected_norms) found = "the norms differ";
    return found;
}

/// The GradientStorage with which gradients live with the library. Those of stage 2 always do.
template <class Stage>
gradsync::GradientStorage with_library(Stage) {
    return Stage::shards_gradients ? gradsync::GradientStorage::automatic : gradsync::GradientStorage::in_buckets;
}

/// Computes and marks the gradients of micro-batch `batch` of all trainable parameters. If `poisoned`, they are infinite.
template <class Sharded>
void sharded_backward(Sharded& sharded, int batch, bool poisoned = false) {
    for (std::size_t i = sharded.parameters().size(); i-- > 0;) {
        if (!sharded.parameters()[i].requires_grad) continue;
        const auto compute = [&] {
            const gradsync::BufferView gradient = sharded.acquire_gradient(i);
            write_gradient(gradient, sharded.parameter_value(i), sharded.backend().rank(), batch, i);
            if (poisoned) write(gradient, constant_bytes(gradient.dtype, gradient.count, std::numeric_limits<double>::infinity()));
            sharded.mark_ready(i);
        };
        if constexpr (requires { sharded.unit_of(i); }) {
            const auto use = sharded.gather(sharded.unit_of(i));
            compute();
        } else {
            sharded.wait_parameter(i);
            compute();
        }
    }
}

/// Checks that `call` throws Error(invalid_argument), whose text has these words and whose context names this parameter.
template <class Call>
void check_refused(Finding& finding, Call&& call, const std::string& words, const std::string& parameter = {}) {
    const Outcome outcome = outcome_of(call);
    finding.check(outcome.is(gradsync::Errc::invalid_argument) && outcome.says(words) && outcome.error->context().parameter == parameter,
                  words + ": " + outcome.text);
}

}  // namespace gradsync_test
