// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <mutex>

#include "list.hpp"
#include "shared.hpp"

namespace gradsync::inline v0_2::detail {

/// Keeps memory alive until the process ends, because a message may still be written into it.
inline void leak_until_exit(Shared<void> what) {
    static std::mutex mutex;
    static auto& kept = *new List<Shared<void>>;
    const std::lock_guard lock(mutex);
    kept.push_back(std::move(what));
}

}  // namespace gradsync::inline v0_2::detail
