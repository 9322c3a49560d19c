// SPDX-License-Identifier: BSL-1.0
#pragma once
// What the models are written in: the functions of an object, `Ops`, that the models take as a template parameter and
// hold by value: a handle, cheap to copy. CpuOps (ops_cpu.hpp) is one, with the list and what each computes; CudaOps
// (cuda/ops_cuda.hpp) another. All arrays are row-major; every function overwrites its output unless its name says
// `add`.
//
// Where arrays are, is theirs:
//   Floats, floats(n)           numbers, zeros at first; everything else takes and gives plain pointers to them
//   Factors, factors(n)         numbers in the type in which matrix products take them, `Factor*`: activations and their gradients
//   rounding(n)                 Factors with room for n rounded numbers; empty if factors are numbers
//   as_factors(n, x, room)      numbers as factors: rounded into `room`, or where they are; rounded(x, room): the same, once more
//   factor_bytes()              of one of them
//   Bytes, bytes(n)             room for the bytes of a batch
//   load(batch, room)           where functions find these bytes; loaded(batch, room): the same, once more
//   read(n, from, own)          numbers for the host: where they are, or copied to `own`. Waits for what computes them
//   write(n, to, fill)          fill(span) writes them on the host; numbers or factors, as with `read`
//   Loss, value(loss)           a loss, which may still be under way, and the number, which is waited for
//   finish()                    on a device: waits for all that is under way
//
// `linear` and `embed` give, `column_sum` takes, and `read` and `write` move either numbers or factors. A
// residual is added only to numbers, by what adds a bias.

#include <cmath>
#include <cstddef>

namespace gradsync_train {

/// Sequences of `length` tokens in one call, each token a row of `heads * head_size` numbers.
struct AttentionShape {
    std::size_t sequences;
    std::size_t length;
    std::size_t heads;
    std::size_t head_size;

    std::size_t width() const { return heads * head_size; }
    /// Of scores.
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_size)); }
};

/// One AdamW step in the host's memory, everything that is the same for all elements folded into a few factors.
struct AdamWFactors {
    float gradient_scale;  // clipping
    float beta1, beta2;
    float step_size;          // learning rate / (1 - beta1^t)
    float second_correction;  // 1 / (1 - beta2^t)
    float epsilon;
    float shrink;  // 1 - learning rate * weight decay
};

}  // namespace gradsync_train
