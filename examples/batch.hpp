// SPDX-License-Identifier: BSL-1.0
#pragma once
// What a model reads.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradsync_train {

/// How a model reads text: rows of `length` bytes, beginning every `stride` bytes, and in each row `targets` bytes to
/// predict: the one after each prefix, or only the one after the whole row.
struct Reading {
    std::size_t length;
    std::size_t stride;
    std::size_t targets;
};

/// One micro-batch: [sequences, length] bytes, and [sequences, targets] bytes to predict.
struct Batch {
    std::size_t sequences = 0;
    std::size_t length = 0;
    std::vector<std::uint8_t> inputs = {};
    std::vector<std::uint8_t> targets = {};
};

}  // namespace gradsync_train
