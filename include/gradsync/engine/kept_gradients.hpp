// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/list.hpp"
#include "../kernel/passes.hpp"

namespace gradsync::inline v0_2::detail {

/// The contents of gradients that live in buckets and that this rank did not use: they come back if no rank did.
template <class B>
class KeptGradients {
public:
    /// Without `wanted` it keeps nothing.
    KeptGradients(B& backend, bool wanted) : passes_(passes_of(backend)), wanted_(wanted) {}

    /// Copies gradient i, which lies in `slot`.
    void keep(std::size_t i, BufferView slot) {
        if (!wanted_) return;
        const std::size_t end = bytes_.size();
        kept_.push_back({i, slot});
        bytes_.resize(end + slot.bytes());
        passes_.read(slot, bytes_.data() + end);
    }
    /// Writes the gradients i for which `unused(i)` back, and forgets all.
    void restore(auto&& unused) {
        const std::uint8_t* bytes = bytes_.data();
        for (const Kept& one : kept_) {
            if (unused(one.parameter)) passes_.write(bytes, one.slot);
            bytes += one.slot.bytes();
        }
        kept_.clear();
        bytes_.clear();
    }

private:
    struct Kept {
        std::size_t parameter;
        BufferView slot;
    };

    [[no_unique_address]] PassesOf<B> passes_;
    const bool wanted_;
    List<Kept> kept_;
    List<std::uint8_t> bytes_;  ///< one gradient after the other
};

}  // namespace gradsync::inline v0_2::detail
