// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "shared.hpp"

namespace gradsync::inline v0_2::detail {

/// Keeps memory alive until the process ends, because a message may still be written into it. Takes no lock: a forked child may call it.
[[gnu::cold]] inline void leak_until_exit(Shared<void> what) {
    struct Kept {
        Shared<void> what;
        Kept* next;
    };
    static std::atomic<Kept*> last{nullptr};
    auto* const kept = new Kept{std::move(what), last.load()};
    while (!last.compare_exchange_weak(kept->next, kept)) {
    }
}

}  // namespace gradsync::inline v0_2::detail
