#pragma once
// Memory that a model computes in.

#include <cstddef>

namespace gradsync_train {

/// Hands out arrays, and knows how much.
template <class Ops>
class Workspace {
public:
    typename Ops::Floats floats(std::size_t n) {
        bytes_ += n * sizeof(float);
        return typename Ops::Floats(n);
    }
    std::size_t bytes() const { return bytes_; }

private:
    std::size_t bytes_ = 0;
};

}  // namespace gradsync_train
