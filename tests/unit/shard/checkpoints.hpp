// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/checkpoint.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/sharding.hpp"
#include "support/temporary_directory.hpp"

/// The trainings whose checkpoints are tested.

namespace gradsync_test {

inline std::size_t files_in(const TemporaryDirectory& directory) {
    std::size_t n = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory.path())) ++n;
    return n;
}

using One = gradsync::ShardedOptimizer<gradsync::ThreadBackend, AdamW, gradsync::Zero1>;
using Three = gradsync::ShardedParameters<gradsync::ThreadBackend, AdamW>;

inline One make_one(gradsync::ThreadBackend comm, std::vector<Tensor>& model, int steps) {
    return One(comm, model, AdamW{.steps = steps}, {}, gradsync::SizeCappedBuckets(4000));
}
inline Three make_three(gradsync::ThreadBackend comm, std::vector<Tensor>& model, int steps) {
    return Three(comm, model, AdamW{.steps = steps}, awkward_units);
}

/// Steps with the same data on every rank, so that the number of ranks does not matter (where it is a power of two).
template <class Sharded>
void train_alike(Sharded& sharded, int first, int last) {
    for (int s = first; s < last; ++s) {
        for (std::size_t i = sharded.parameters().size(); i-- > 0;) {
            const auto mark = [&] {
                write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), 0, s, i);
                sharded.mark_ready(i);
            };
            if constexpr (requires { sharded.gather(0); }) {
                const auto use = sharded.gather(sharded.unit_of(i));
                mark();
            } else {
                mark();
            }
        }
        sharded.finish();
        sharded.step();
    }
}

}  // namespace gradsync_test
