// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "../../core/leak_until_exit.hpp"

namespace gradsync::inline v0_2::message_passing {

/// Memory that outlives every message from or to it, so that messages need no copy. Thread-safe.
class KnownMemory {
public:
    void add(const void* base, std::size_t bytes) {
        std::lock_guard lock(mutex_);
        blocks_.push_back({reinterpret_cast<std::uintptr_t>(base), bytes});
    }
    void remove(const void* base) noexcept {
        std::lock_guard lock(mutex_);
        std::erase_if(blocks_, [&](const Block& block) { return block.base == reinterpret_cast<std::uintptr_t>(base); });
    }
    bool contains(const void* address, std::size_t bytes) const noexcept {
        const auto at = reinterpret_cast<std::uintptr_t>(address);
        std::lock_guard lock(mutex_);
        for (const Block& block : blocks_)
            if (at >= block.base && at - block.base <= block.bytes && bytes <= block.bytes - (at - block.base)) return true;
        return false;
    }

private:
    struct Block {
        std::uintptr_t base;
        std::size_t bytes;
    };

    mutable std::mutex mutex_;
    std::vector<Block> blocks_;
};

using gradsync::detail::leak_until_exit;

}  // namespace gradsync::inline v0_2::message_passing
