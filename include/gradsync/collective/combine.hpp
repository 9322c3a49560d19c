// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/list.hpp"
#include "../kernel/reduce.hpp"
#include "call.hpp"

namespace gradsync::inline v0_2::collective {

/// Combines elements of all ranks as their calls ask for. Keeps its scratch, so that a steady state allocates nothing. For one thread at a
/// time.
class Combiner {
public:
    explicit Combiner(std::size_t ranks) : inputs_(ranks), scales_(ranks) {}

    /// `inputs[r]`: the `count` elements of rank r; not read if its scale in a mean is 0.
    template <class = void>  // see isa.hpp
    void run(ListView<const Call> calls, ListView<const void* const> inputs, ListView<void* const> outputs, std::size_t count) {
        const Call& call = calls[0];
        const bool mean = call.op == ReduceOp::mean;
        std::size_t used = 0;
        double weight = 0;
        bool scaled = false;
        for (std::size_t r = 0; r < calls.size(); ++r) {
            const Contribution& contribution = calls[r].contribution;
            if (mean) weight += contribution.weight;
            if (mean && contribution.scale == 0) continue;
            inputs_[used] = inputs[r];
            scales_[used++] = contribution.scale;
            scaled |= mean && contribution.scale != 1;
        }
        if (mean && weight == 0) used = 0;
        kernel::reduce({.inputs = {inputs_.data(), used},
                        .scales = {scales_.data(), scaled ? used : 0},
                        .outputs = outputs,
                        .count = count,
                        .dtype = call.dtype,
                        .op = call.op,
                        .factor = mean && weight != 0 ? 1 / weight : 1});
    }

private:
    List<const void*> inputs_;
    List<double> scales_;
};

}  // namespace gradsync::inline v0_2::collective
