// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/math.hpp"
#include "checked_size.hpp"

namespace gradsync::inline v0_2::plan {

/// The way to split the state of a model over data-parallel ranks (ZeRO, arXiv 1910.02054).
enum class ZeroStage : std::uint8_t {
    none,        ///< every rank holds everything
    optimizer,   ///< stage 1: the optimizer's state is split
    gradients,   ///< stage 2: the gradients too
    parameters,  ///< stage 3, FSDP: the weights too
};

constexpr std::string_view name_of(ZeroStage stage) noexcept {
    return gradsync::detail::name_in({"none", "optimizer", "gradients", "parameters"}, stage);
}

/// Bytes of a model's state per parameter. A master copy of the weights, if there is one, belongs to the optimizer's
/// state and is split with it.
struct StateBytes {
    std::uint64_t weights = 4;    ///< of a weight
    std::uint64_t gradients = 4;  ///< of a gradient
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
    /// Bytes of weights, gradients, and the optimizer's state with master weights.
    std::uint64_t weights = 0, gradients = 0, optimizer = 0;
    std::uint64_t sums = 0;  ///< sums of micro-batches that the library keeps beside the gradients

    /// Returns the sum of all.
    std::uint64_t total() const { return (CheckedSize(weights) + gradients + optimizer + sums).value(); }
};

/// The memory of each of `ranks` ranks. A rank's shard is ceil(parameters / ranks), as everywhere in this library. For
/// mixed precision, P parameters and n ranks, the stages take 16 P; 4 P + 12 P / n; 2 P + 14 P / n; 16 P / n.
/// `micro_batches`: those of a step over all ranks, if the library adds them up (ReducerOptions::micro_batches); it
/// then keeps up to log2(V / n) sums in f32, of whole gradients or of shards. Throws Error(invalid_argument) if `ranks`
/// is 0, or a number does not fit into 64 bits.
inline StateMemory state_memory(std::uint64_t parameters, StateBytes bytes, ZeroStage stage, std::uint64_t ranks,
                                std::uint64_t micro_batches = 0) {
    detail::check_positive({{ranks, "the number of ranks"}});
    const std::uint64_t shard = parameters / ranks + (parameters % ranks != 0);
    const auto of = [&](std::uint64_t each, ZeroStage split_from) {
        return (CheckedSize(stage >= split_from ? shard : parameters) * each).value();
    };
    const std::uint64_t each = micro_batches / ranks + (micro_batches % ranks != 0);  // micro-batches per rank
    std::uint64_t open = each == 0 ? 0 : gradsync::detail::open_sums(each);
    if (open != 0 && stage >= ZeroStage::gradients) --open;  // the first sum of a shard lies in the shard
    return {of(bytes.weights, ZeroStage::parameters), of(bytes.gradients, ZeroStage::gradients),
            of(bytes.optimizer, ZeroStage::optimizer),
            (CheckedSize(of(bytes.gradients < 4 ? 4 : bytes.gradients, ZeroStage::gradients)) * open).value()};
}

}  // namespace gradsync::inline v0_2::plan
