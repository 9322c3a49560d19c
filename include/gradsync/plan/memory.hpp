// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <vector>

#include "../core/math.hpp"
#include "checked_size.hpp"

namespace gradsync::inline v0_2::plan {

/// The way to split the state of a model over data-parallel ranks (ZeRO, arXiv 1910.02054).
enum class ZeroStage : std::uint8_t {
    none,        ///< every rank holds everything
    optimizer,   ///< stage 1: the optimizer's state is split
    gradients,   ///< stage 2: and the gradients
    parameters,  ///< stage 3, FSDP: and the weights
};

constexpr std::string_view name_of(ZeroStage stage) noexcept {
    return gradsync::detail::name_in({"none", "optimizer", "gradients", "parameters"}, stage);
}

/// Bytes of a model's state per parameter. A master copy of the weights, if there is one, belongs to the optimizer's state and is split
/// with it.
struct StateBytes {
    std::uint64_t weights = 4;
    std::uint64_t gradients = 4;
    std::uint64_t optimizer = 8;  ///< Adam: two moments
};

/// All in f32.
inline constexpr StateBytes single_precision_adam{4, 4, 8};
/// 16-bit weights and gradients; master weights and two moments in f32.
inline constexpr StateBytes mixed_precision_adam{2, 2, 12};
/// All in 16 bits, the moments too.
inline constexpr StateBytes half_precision_adam{2, 2, 4};

/// Bytes per rank.
struct StateMemory {
    std::uint64_t weights = 0, gradients = 0, optimizer = 0;
    std::uint64_t sums = 0;  ///< of micro-batches that the library adds up, beside the gradients

    std::uint64_t total() const { return (CheckedSize(weights) + gradients + optimizer + sums).value(); }
};

/// The memory of each of `ranks` ranks. A rank's shard is ceil(parameters / ranks), as everywhere in this library. For mixed precision, P
/// parameters and n ranks, the stages take 16 P; 4 P + 12 P / n; 2 P + 14 P / n; 16 P / n. `micro_batches`: of a step, of all ranks, if the
/// library adds them up (ReducerOptions::micro_batches); it then keeps up to log2(V / n) sums in f32, of whole gradients or of shards.
/// Throws Error(invalid_argument) if `ranks` is 0, or a number does not fit into 64 bits.
inline StateMemory state_memory(std::uint64_t parameters, StateBytes bytes, ZeroStage stage, std::uint64_t ranks,
                                std::uint64_t micro_batches = 0) {
    detail::check_positive({{ranks, "the number of ranks"}});
    const std::uint64_t shard = parameters / ranks + (parameters % ranks != 0);
    const auto of = [&](std::uint64_t each, ZeroStage split_from) {
        return (CheckedSize(stage >= split_from ? shard : parameters) * each).value();
    };
    const std::uint64_t each = micro_batches / ranks + (micro_batches % ranks != 0);  // of a rank
    std::uint64_t open = each == 0 ? 0 : gradsync::detail::open_sums(each);
    if (open != 0 && stage >= ZeroStage::gradients) --open;  // the first sum of a shard lies in the shard
    return {of(bytes.weights, ZeroStage::parameters), of(bytes.gradients, ZeroStage::gradients), of(bytes.optimizer, ZeroStage::optimizer),
            (CheckedSize(of(bytes.gradients < 4 ? 4 : bytes.gradients, ZeroStage::gradients)) * open).value()};
}

/// Fully connected layers: widths {in, hidden..., out}.
struct Mlp {
    std::vector<std::uint64_t> widths;
    bool biases = false;

    std::uint64_t parameters() const {
        check();
        CheckedSize sum = 0;
        for (std::size_t i = 1; i < widths.size(); ++i) {
            sum = sum + CheckedSize(widths[i - 1]) * widths[i];
            if (biases) sum = sum + widths[i];
        }
        return sum.value();
    }

    /// The number of elements that a forward pass keeps: the input and every layer's output.
    std::uint64_t activations(std::uint64_t batch) const {
        check();
        CheckedSize sum = 0;
        for (const std::uint64_t width : widths) sum = sum + width;
        return (sum * batch).value();
    }

private:
    void check() const {
        if (widths.size() < 2) detail::refuse("an MLP needs at least two widths, of its input and its output");
        for (const std::uint64_t width : widths) detail::check_positive({{width, "a width of the MLP"}});
    }
};

/// Blocks of two linear layers, d_model to d_ff and back, and nothing else. They are most of a very large transformer.
struct FeedForward {
    std::uint64_t d_model = 0, d_ff = 0, blocks = 0;

    std::uint64_t parameters() const {
        check();
        return (CheckedSize(2) * blocks * d_model * d_ff).value();
    }

    /// The number of elements that a forward pass keeps per token: every layer's input.
    std::uint64_t activations_per_token() const {
        check();
        return ((CheckedSize(d_model) + d_ff) * blocks).value();
    }
    std::uint64_t activations(std::uint64_t batch, std::uint64_t sequence) const {
        return (CheckedSize(activations_per_token()) * batch * sequence).value();
    }

private:
    void check() const { detail::check_positive({{d_model, "d_model"}, {d_ff, "d_ff"}, {blocks, "the number of blocks"}}); }
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
        check();
        const CheckedSize d = d_model, ff = width_of_ff();
        const CheckedSize norm = d * (biases ? 2 : 1);
        CheckedSize block = d * d * 4 + d * ff * (gated ? 3 : 2) + norm * 2;
        if (biases) block = block + d * 4 + ff * (gated ? 2 : 1) + d;
        CheckedSize tables = CheckedSize(vocabulary) * d * (tied ? 1 : 2) + CheckedSize(learned_positions) * d;
        return (block * blocks + tables + norm).value();
    }

    /// The number of elements that a forward pass keeps, by the estimate  B C (2 V + l (k e + h C)):  for each token and block, k rows of
    /// width d_model (e) and a row of attention weights per head (h); and the logits and their gradient. B is the batch, C the context, V
    /// the vocabulary, l the blocks. k = 6 counts three of attention's inputs, its output, and two of the feed-forward layer; it depends on
    /// the trainer. With `recompute` blocks keep only their input, and one block at a time the rest:  B C (2 V + l e + k e + h C).
    std::uint64_t activations(std::uint64_t batch, std::uint64_t context, bool recompute = false) const {
        check();
        const CheckedSize block = CheckedSize(kept_rows) * d_model + CheckedSize(heads) * context;
        const CheckedSize all = recompute ? CheckedSize(d_model) * blocks + block : block * blocks;
        return (CheckedSize(batch) * context * (CheckedSize(2) * vocabulary + all)).value();
    }

    std::uint64_t width_of_ff() const { return d_ff != 0 ? d_ff : (CheckedSize(4) * d_model).value(); }

private:
    void check() const {
        detail::check_positive(
            {{vocabulary, "the vocabulary"}, {d_model, "d_model"}, {blocks, "the number of blocks"}, {heads, "the number of heads"}});
    }
};

}  // namespace gradsync::inline v0_2::plan
