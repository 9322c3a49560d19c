// SPDX-License-Identifier: BSL-1.0
#pragma once
// The gradients that a backward pass writes.

#include <cstddef>

namespace gradsync_train {

/// Owns the gradients. Every backward pass overwrites them.
class GradientStore {
public:
    /// Returns the memory of gradient i. Call it just before you write: the memory may exist only then.
    virtual float* gradient(std::size_t i) = 0;
    /// It is final: once for each of the parameter's uses.
    virtual void ready(std::size_t i) = 0;

protected:
    ~GradientStore() = default;
};

}  // namespace gradsync_train
