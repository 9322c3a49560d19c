// SPDX-License-Identifier: BSL-1.0
#pragma once
// Where a backward pass writes its gradients, and whom it tells that one is final.

#include <cstddef>

namespace gradsync_train {

/// Owns the gradients. Every backward pass overwrites them.
class GradientStore {
public:
    /// Where gradient i is; asked for when it is about to be written, as it may have memory only then.
    virtual float* gradient(std::size_t i) = 0;
    /// It is final: once for each of the parameter's uses.
    virtual void ready(std::size_t i) = 0;

protected:
    ~GradientStore() = default;
};

}  // namespace gradsync_train
