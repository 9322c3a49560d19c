// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <mutex>

#include "shared.hpp"

namespace gradsync::inline v0_2::detail {

/// Keeps memory alive until the process ends, because a message may still be written into it.
inline void leak_until_exit(Shared<void> what) {
    struct Kept {
        Shared<void> what;
        Kept* next;
    };
    static std::mutex mutex;
    static Kept* first = nullptr;
    std::lock_guard lock(mutex);
    first = new Kept{std::move(what), first};
}

}  // namespace gradsync::inline v0_2::detail
