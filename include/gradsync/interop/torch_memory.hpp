// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "../core/forked.hpp"
#include "../core/math.hpp"

namespace gradsync::inline v0_2::detail {

/// Memory that the ranks of a machine share, in slots of the sizes of gradients. Thread-safe.
class TorchArena {
public:
    /// In bytes: smaller gradients travel in common buckets, as copies.
    static constexpr std::size_t least = std::size_t{64} << 10;

    /// The bytes of an arena for gradients of these sizes. Each large size has a spare slot, because the last
    /// step's gradients stay until new ones replace them. A size that several gradients have gets one more,
    /// for other results of that size.
    static std::size_t bytes(std::vector<std::size_t> sizes) {
        std::size_t total = 0;
        for (const std::size_t size : with_spares(sizes)) total += stride(size);
        return total;
    }
    TorchArena(std::shared_ptr<void> memory, const std::vector<std::size_t>& sizes) : memory_(std::move(memory)) {
        auto* next = static_cast<std::byte*>(memory_.get());
        for (const std::size_t size : with_spares(sizes)) {
            free_[size].push_back(next);
            next += stride(size);
        }
    }

    /// Takes a slot of exactly `size` bytes. Returns null if none is free, and in a forked child,
    /// because its parent writes here.
    void* take(std::size_t size) {
        if (!maker_.is_here()) return nullptr;
        const std::lock_guard lock(mutex_);
        const auto slots = free_.find(size);
        if (slots == free_.end() || slots->second.empty()) return nullptr;
        void* const slot = slots->second.back();
        slots->second.pop_back();
        return slot;
    }
    void give_back(void* slot, std::size_t size) {
        const std::lock_guard lock(mutex_);
        free_[size].push_back(slot);
    }

private:
    static std::vector<std::size_t> with_spares(std::vector<std::size_t> sizes) {
        std::sort(sizes.begin(), sizes.end());
        for (std::size_t k = 0, count = sizes.size(), equal = 0; k < count; ++k) {
            equal = k != 0 && sizes[k] == sizes[k - 1] ? equal + 1 : 1;
            if (sizes[k] >= least && equal <= 2) sizes.push_back(std::size_t{sizes[k]});
        }
        return sizes;
    }
    /// A slot ends with a gap: gradients side by side would form one bucket, and new ones would be copied into it.
    static constexpr std::size_t stride(std::size_t size) noexcept { return round_up(size, line_bytes) + line_bytes; }

    const Maker maker_;
    std::mutex mutex_;
    std::shared_ptr<void> memory_;
    std::map<std::size_t, std::vector<void*>> free_;
};

/// An allocator of libtorch's host tensors, in front of the previous one. In a backward it puts results of the size of
/// a gradient into arenas while there is room, so that autograd makes gradients in memory that the ranks share.
class TorchAllocator final : public c10::Allocator {
public:
    /// Allocates from `arena` while the returned pointer lives.
    static std::shared_ptr<void> open(std::shared_ptr<TorchArena> arena) {
        static auto* const only = [] {  // never destroyed: tensors outlive everything
            auto* const made = new TorchAllocator(*c10::GetCPUAllocator());
            c10::SetCPUAllocator(made);
            return made;
        }();
        const std::lock_guard lock(only->mutex_);
        only->arenas_.push_back(arena);
        return {arena.get(), [arena](void*) {
                    const std::lock_guard closing(only->mutex_);
                    std::erase(only->arenas_, arena);
                }};
    }

    // Each of these is virtual in some versions of libtorch.
    c10::DataPtr allocate(std::size_t bytes) { return obtain(bytes); }
    c10::DataPtr allocate(std::size_t bytes) const { return obtain(bytes); }
    void copy_data(void* to, const void* from, std::size_t bytes) const { std::memcpy(to, from, bytes); }
    c10::DeleterFnPtr raw_deleter() const override { return before_.raw_deleter(); }

private:
    struct Block {
        std::shared_ptr<TorchArena> arena;
        void* data;
        std::size_t bytes;
    };

    explicit TorchAllocator(c10::Allocator& before) : before_(before) {}

    c10::DataPtr obtain(std::size_t bytes) const {
        // This is true outside of a backward, and in one that retains its graph.
        if (bytes >= TorchArena::least && !torch::autograd::get_current_graph_task_keep_graph()) {
            const std::lock_guard lock(mutex_);
            for (const std::shared_ptr<TorchArena>& arena : arenas_)
                if (void* const data = arena->take(bytes)) {
                    const auto give_back = [](void* context) {
                        const std::unique_ptr<Block> block(static_cast<Block*>(context));
                        block->arena->give_back(block->data, block->bytes);
                    };
                    return {data, new Block{arena, data, bytes}, give_back, c10::Device(c10::DeviceType::CPU)};
                }
        }
        return before_.allocate(bytes);
    }

    c10::Allocator& before_;
    mutable std::mutex mutex_;
    std::vector<std::shared_ptr<TorchArena>> arenas_;
};

}  // namespace gradsync::inline v0_2::detail
