// SPDX-License-Identifier: BSL-1.0
#pragma once
// How many parameters models have, and how many activations they keep. The numbers are positive; a count that 64 bits do not hold is a
// gradsync::Error.

#include <cstdint>
#include <utility>
#include <vector>

#include <gradsync/planning/checked_size.hpp>

namespace gradsync_plan {

using gradsync::plan::CheckedSize;

/// The rows and columns of a model's matrices, but those of tables, in the order of the forward pass.
using Matrices = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

/// Fully connected layers: widths {in, hidden..., out}.
struct Mlp {
    std::vector<std::uint64_t> widths;
    bool biases = false;

    std::uint64_t parameters() const {
        CheckedSize sum = 0;
        for (std::size_t i = 1; i < widths.size(); ++i) {
            sum = sum + CheckedSize(widths[i - 1]) * widths[i];
            if (biases) sum = sum + widths[i];
        }
        return sum.value();
    }

    Matrices matrices() const {
        Matrices all;
        for (std::size_t i = 1; i < widths.size(); ++i) all.emplace_back(widths[i], widths[i - 1]);
        return all;
    }

    /// The number of elements that a forward pass keeps: the input and every layer's output.
    std::uint64_t activations(std::uint64_t batch) const {
        CheckedSize sum = 0;
        for (const std::uint64_t width : widths) sum = sum + width;
        return (sum * batch).value();
    }
};

/// Blocks of two linear layers, d_model to d_ff and back, and nothing else. They are most of a very large transformer.
struct FeedForward {
    std::uint64_t d_model = 0, d_ff = 0, blocks = 0;

    std::uint64_t parameters() const { return (CheckedSize(2) * blocks * d_model * d_ff).value(); }

    Matrices matrices() const {
        Matrices all;
        for (std::uint64_t b = 0; b < blocks; ++b) all.insert(all.end(), {{d_ff, d_model}, {d_model, d_ff}});
        return all;
    }

    /// The number of elements that a forward pass keeps per token: every layer's input.
    std::uint64_t activations_per_token() const { return ((CheckedSize(d_model) + d_ff) * blocks).value(); }
    std::uint64_t activations(std::uint64_t batch, std::uint64_t sequence) const {
        return (CheckedSize(activations_per_token()) * batch * sequence).value();
    }
};

/// A decoder-only transformer.
struct Transformer {
    std::uint64_t vocabulary = 0, d_model = 0, blocks = 0, heads = 1;
    std::uint64_t d_ff = 0;               ///< 0: 4 d_model
    std::uint64_t learned_positions = 0;  ///< rows of the table of positions; 0: none
    bool gated = false;                   ///< three matrices in the feed-forward layer, not two
    bool biases = true;                   ///< linear layers and norms have them
    bool tied = false;                    ///< output layer and embedding are one matrix
    std::uint64_t kept_rows = 6;          ///< rows of d_model elements that a block keeps per token for its backward

    std::uint64_t parameters() const {
        const CheckedSize d = d_model, ff = width_of_ff();
        const CheckedSize norm = d * (biases ? 2 : 1);
        CheckedSize block = d * d * 4 + d * ff * (gated ? 3 : 2) + norm * 2;
        if (biases) block = block + d * 4 + ff * (gated ? 2 : 1) + d;
        CheckedSize tables = CheckedSize(vocabulary) * d * (tied ? 1 : 2) + CheckedSize(learned_positions) * d;
        return (block * blocks + tables + norm).value();
    }

    /// Queries, keys and values are one matrix.
    Matrices matrices() const {
        Matrices all;
        const std::uint64_t d = d_model, ff = width_of_ff();
        for (std::uint64_t b = 0; b < blocks; ++b) {
            all.insert(all.end(), {{(CheckedSize(3) * d).value(), d}, {d, d}, {ff, d}, {d, ff}});
            if (gated) all.emplace_back(ff, d);
        }
        return all;
    }

    /// The number of elements that a forward pass keeps, by the estimate  B C (2 V + l (k e + h C)):  for each token and block, k rows of
    /// width d_model (e) and a row of attention weights per head (h); and the logits and their gradient. B is the batch, C the context, V
    /// the vocabulary, l the blocks. k = 6 counts three of attention's inputs, its output, and two of the feed-forward layer; it depends on
    /// the trainer. With `recompute` blocks keep only their input, and one block at a time the rest:  B C (2 V + l e + k e + h C).
    std::uint64_t activations(std::uint64_t batch, std::uint64_t context, bool recompute = false) const {
        const CheckedSize block = CheckedSize(kept_rows) * d_model + CheckedSize(heads) * context;
        const CheckedSize all = recompute ? CheckedSize(d_model) * blocks + block : block * blocks;
        return (CheckedSize(batch) * context * (CheckedSize(2) * vocabulary + all)).value();
    }

    std::uint64_t width_of_ff() const { return d_ff != 0 ? d_ff : (CheckedSize(4) * d_model).value(); }
};

}  // namespace gradsync_plan
