// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/list.hpp"
#include "../core/sum_tree.hpp"
#include "../kernel/reduce.hpp"
#include "call.hpp"

namespace gradsync::inline v0_2::collective {

/// Combines elements of all ranks as their calls ask for. Keeps its scratch, so that a steady state allocates nothing. For one thread at a
/// time.
class Combiner {
public:
    explicit Combiner(std::size_t ranks) : inputs_(ranks), scales_(ranks), sums_(ranks), open_(ranks) {}

    /// Takes each rank's elements as the sum of several leaves: `leaves`, by rank. (Default: of one.)
    void set_leaves(List<std::size_t> leaves) { leaves_ = std::move(leaves); }

    /// `inputs[r]`: the `count` elements of rank r; not read if its scale in a mean is 0.
    template <class = void>  // see isa.hpp
    void run(std::span<const Call> calls, std::span<const void* const> inputs, std::span<void* const> outputs, std::size_t count) {
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
        const bool irregular = used != calls.size() || !leaves_.empty();
        if (irregular) find_sums(calls);
        if (mean && weight == 0) used = 0;
        kernel::reduce({.inputs = {inputs_.data(), used},
                        .scales = {scales_.data(), scaled ? used : 0},
                        .outputs = outputs,
                        .count = count,
                        .dtype = call.dtype,
                        .op = call.op,
                        .factor = mean && weight != 0 ? 1 / weight : 1,
                        .sums = {sums_.data(), irregular ? used : 0}});
    }

private:
    /// The sums of a tree in which ranks are several leaves, or have nothing: the sum of something and nothing is no sum.
    void find_sums(std::span<const Call> calls) noexcept {
        std::size_t used = 0, top = 0, last = 0, leaves = 0;
        for (std::size_t r = 0; r < calls.size(); ++r) leaves += leaves_of(r);
        for (std::size_t r = 0; r < calls.size(); ++r) {
            const bool present = calls[r].op != ReduceOp::mean || calls[r].contribution.scale != 0;
            if (present) sums_[used++] = 0;
            open_[top++] = {last, present};
            last += leaves_of(r);
            for (; top > 1 && gradsync::detail::are_halves(open_[top - 2].first, open_[top - 1].first, last, leaves); --top) {
                if (open_[top - 2].present && open_[top - 1].present) ++sums_[used - 1];
                open_[top - 2].present |= open_[top - 1].present;
            }
        }
    }
    std::size_t leaves_of(std::size_t rank) const noexcept { return leaves_.empty() ? 1 : leaves_[rank]; }

    struct Node {
        std::size_t first = 0;
        bool present = false;
    };

    List<std::size_t> leaves_;
    List<const void*> inputs_;
    List<double> scales_;
    List<std::uint8_t> sums_;  ///< by input, see kernel::Reduction
    List<Node> open_;
};

}  // namespace gradsync::inline v0_2::collective
