// SPDX-License-Identifier: BSL-1.0
#pragma once
// Memory that a model computes in.

#include <cstddef>

namespace gradsync_train {

/// Hands out arrays, and knows how much.
template <class Ops>
class Workspace {
public:
    explicit Workspace(Ops ops) : ops_{ops} {}

    typename Ops::Floats floats(std::size_t n) {
        bytes_ += n * sizeof(float);
        return ops_.floats(n);
    }
    typename Ops::Factors factors(std::size_t n) {
        bytes_ += n * ops_.factor_bytes();
        return ops_.factors(n);
    }
    std::size_t bytes() const { return bytes_; }

private:
    Ops ops_;
    std::size_t bytes_ = 0;
};

}  // namespace gradsync_train
