// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <gradsync/engine/gradient_sync.hpp>

#include <utility>
#include <vector>

#include "tensor.hpp"

namespace gradsync_test {

/// The engine below all faces, with some calls of a Reducer.
template <class B>
class BareEngine {
public:
    BareEngine(const B& backend, std::vector<Tensor>& model, const gradsync::ReducerOptions& options,
               gradsync::detail::Policies<B> policies)
        : guard_(backend, "this engine"),
          engine_(guard_, gradsync::detail::view_parameters<gradsync::MemorySpace::host>(model), options, std::move(policies)) {}

    const gradsync::BucketPlan& plan() const { return engine_.home().planned().plan(); }
    gradsync::BufferView gradient_view(std::size_t i) const { return engine_.gradient_view(i); }
    void mark_ready(std::size_t i) { engine_.marks().mark_ready(i); }
    void finish() { engine_.finish(); }
    gradsync::NoSync no_sync() { return engine_.marks().no_sync(); }
    void discard() { engine_.marks().discard(); }
    bool accumulates() const { return engine_.marks().accumulates(); }

private:
    gradsync::detail::Guard<B> guard_;
    gradsync::detail::GradientSync<B> engine_;
};

}  // namespace gradsync_test
