#pragma once
// What the models are written in: a set of static functions in one struct, which the models take as a template
// parameter. A device is added by writing them once more (see ops_cpu.hpp for the list). All arrays are row-major; no
// function allocates; every function overwrites its output unless its name says `add`.

#include <cstddef>

namespace gradsync_train {

/// Sequences of `length` tokens in one call, each token a row of `heads * head_size` numbers.
struct AttentionShape {
    std::size_t sequences;
    std::size_t length;
    std::size_t heads;
    std::size_t head_size;

    std::size_t width() const { return heads * head_size; }
};

/// One AdamW step, everything that is the same for all elements folded into a few factors.
struct AdamWFactors {
    float gradient_scale;  // clipping
    float beta1, beta2;
    float step_size;          // learning rate / (1 - beta1^t)
    float second_correction;  // 1 / (1 - beta2^t)
    float epsilon;
    float shrink;  // 1 - learning rate * weight decay
};

}  // namespace gradsync_train
