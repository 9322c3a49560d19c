// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../kernel/tables.hpp"
#include "call.hpp"

namespace gradsync::inline v0_2::collective {

/// Combines elements of all ranks as their calls ask for. Reuses its scratch memory, so that a steady state allocates
/// nothing. Not thread-safe.
class Combiner {
public:
    explicit Combiner(std::size_t ranks)
        : leaf_count_(ranks), inputs_(ranks), scales_(ranks), sums_(ranks), open_(ranks) {}

    /// Makes each rank's elements count as the sum of several leaves: `leaves`, by rank. Default: one each.
    void set_leaves(List<std::size_t> leaves) {
        leaves_ = std::move(leaves);
        leaf_count_ = 0;
        for (const std::size_t count : leaves_) leaf_count_ += count;
    }

    /// `inputs[r]`: the `count` elements of rank r; not read if its scale in a mean is 0.
    template <class = void>  // see isa.hpp
    void run(ListView<const Call> calls, ListView<const void* const> inputs, ListView<void* const> outputs,
             std::size_t count) {
        const Call& call = calls[0];
        const bool mean = call.op == ReduceOp::mean;
        std::size_t used = 0;
        bool scaled = false;
        for (std::size_t r = 0; r < calls.size(); ++r) {
            const Contribution& contribution = calls[r].contribution;
            open_[r].weight = contribution.weight;
            if (mean && contribution.scale == 0) continue;
            inputs_[used] = inputs[r];
            scales_[used++] = contribution.scale;
            scaled |= mean && contribution.scale != 1;
        }
        const bool plain = leaves_.empty() && used == calls.size();  // every rank is one leaf
        const bool regular = plain || find_sums(calls);
        if (plain && mean) add_weights(calls.size());
        const double weight = mean ? open_[0].weight : 1;
        if (weight == 0) used = 0;
        kernel::reduce({.inputs = {inputs_.data(), used},
                        .scales = {scales_.data(), scaled ? used : 0},
                        .outputs = outputs,
                        .count = count,
                        .dtype = call.dtype,
                        .op = call.op,
                        .factor = weight != 0 ? 1 / weight : 1,
                        .sums = {sums_.data(), regular ? 0 : used}});
    }

private:
    /// A node of the tree whose sum is on the stack. The weights of the ranks are summed in the same order.
    struct Node {
        std::size_t first = 0;
        bool present = false;
        double weight = 0;
    };

    /// Sums the weights if every rank is one leaf: adding two nodes of the same size at a time also follows the tree.
    void add_weights(std::size_t ranks) noexcept {
        for (std::size_t size = 1; size < ranks; size *= 2)
            for (std::size_t r = 0; r + size < ranks; r += 2 * size) open_[r].weight += open_[r + size].weight;
    }

    /// Finds the order of the sums, and sums the weights, if ranks have several leaves or contribute nothing. Returns
    /// true if the order is the same as if every contributing rank were one leaf.
    bool find_sums(ListView<const Call> calls) noexcept {
        std::size_t used = 0, top = 0, last = 0;
        for (std::size_t r = 0; r < calls.size(); ++r) {
            open_[top++] = {last, calls[r].op != ReduceOp::mean || calls[r].contribution.scale != 0,
                            calls[r].contribution.weight};
            if (open_[top - 1].present) sums_[used++] = 0;
            last += leaves_.empty() ? 1 : leaves_[r];
            for (;
                 top > 1 && gradsync::detail::are_halves(open_[top - 2].first, open_[top - 1].first, last, leaf_count_);
                 --top) {
                Node& left = open_[top - 2];
                const Node& right = open_[top - 1];
                if (left.present && right.present) ++sums_[used - 1];  // a missing side needs no addition
                left = {left.first, left.present || right.present, left.weight + right.weight};
            }
        }
        bool regular = true;
        for (std::size_t i = 0; i < used; ++i) regular &= sums_[i] == gradsync::detail::sums_after(i, used);
        return regular;
    }

    List<std::size_t> leaves_;  ///< by rank; empty: one each
    std::size_t leaf_count_;
    List<const void*> inputs_;
    List<double> scales_;
    List<std::uint8_t> sums_;  ///< by input, see kernel::Reduction
    List<Node> open_;
};

}  // namespace gradsync::inline v0_2::collective
