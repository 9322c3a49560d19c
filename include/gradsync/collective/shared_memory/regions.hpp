// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <mutex>

#include "../../core/shared.hpp"
#include "../call.hpp"

namespace gradsync::inline v0_2::shared_memory {

using collective::Call;
using gradsync::detail::Shared;

/// The memory regions that this process shares with others, by numbers that mean the same to all of them. An address in a region travels as
/// number and offset, in the 64 bits of a pointer. Thread-safe.
class Regions {
public:
    static constexpr int offset_bits = 40;
    static constexpr std::size_t largest = std::size_t{1} << offset_bits;  ///< region
    static constexpr std::uint32_t most = (std::uint32_t{1} << (64 - offset_bits)) - 2;

    /// Adds a region. `number` must be new, and is never reused. Throws Error(invalid_argument) if it is `most` or more, or the region too large.
    void add(std::uint32_t number, std::byte* base, std::size_t bytes) {
        if (bytes > largest) gradsync::detail::refuse("allocate", collective::text("cannot share ", bytes, " bytes at once"));
        if (number >= most)
            gradsync::detail::refuse("allocate",
                                     collective::text(number, " pieces of shared memory were made; make a new backend for more"));
        std::lock_guard lock(mutex_);
        if (number >= regions_.size()) regions_.resize(number + 1);
        live_.push_back(number);
        regions_[number] = {base, bytes};
    }
    void remove(std::uint32_t number) noexcept {
        std::lock_guard lock(mutex_);
        regions_[number] = {};
        live_.erase_if([&](std::uint32_t live) { return live == number; });
    }

    /// Encodes `address`. Returns false if the `bytes` bytes do not all lie in one region.
    bool publish(const void* address, std::size_t bytes, const void*& published) const noexcept {
        const auto at = reinterpret_cast<std::uintptr_t>(address);
        std::lock_guard lock(mutex_);
        for (const std::size_t number : live_) {
            const auto base = reinterpret_cast<std::uintptr_t>(regions_[number].base);
            if (at < base || at - base > regions_[number].bytes || bytes > regions_[number].bytes - (at - base)) continue;
            published = reinterpret_cast<const void*>(((number + 1) << offset_bits) | (at - base));
            return true;
        }
        return false;
    }

    const void* resolve(const void* published) const noexcept {
        const auto address = reinterpret_cast<std::uintptr_t>(published);
        if (address == 0) return nullptr;
        std::lock_guard lock(mutex_);
        return regions_[(address >> offset_bits) - 1].base + (address & ((std::uintptr_t{1} << offset_bits) - 1));
    }

private:
    struct Region {
        std::byte* base = nullptr;
        std::size_t bytes = 0;
    };

    mutable std::mutex mutex_;
    List<Region> regions_;      ///< by number
    List<std::uint32_t> live_;  ///< numbers of the existing regions
};
static_assert(sizeof(void*) == 8, "an address travels as a number and an offset of 64 bits");

/// Ranks that are processes which have mapped the same regions. A call with a buffer outside of them is marked `elsewhere`: the ranks meet
/// in it, but no data moves. (A single rank can reach everything.)
class RegionSpace {
public:
    explicit RegionSpace(Shared<const Regions> regions, bool alone = false) noexcept : regions_(std::move(regions)), alone_(alone) {}

    Call publish(const Call& call) const noexcept {
        if (alone_) return call;
        Call published = call;
        const void* out = nullptr;
        published.in = nullptr;
        published.elsewhere = !find(call.in, call.in_count, call.dtype, published.in) || !find(call.out, call.out_count, call.dtype, out);
        published.out = const_cast<void*>(out);
        return published;
    }

    Call resolve(const Call& call) const noexcept {
        Call resolved = call;
        if (alone_ || call.elsewhere) return resolved;
        resolved.in = regions_->resolve(call.in);
        resolved.out = const_cast<void*>(regions_->resolve(call.out));
        return resolved;
    }

    static constexpr bool keeps_memory = true;

private:
    bool find(const void* address, std::size_t count, DType dtype, const void*& published) const noexcept {
        return count == 0 || regions_->publish(address, count * size_of(dtype), published);
    }

    Shared<const Regions> regions_;
    bool alone_;
};
}  // namespace gradsync::inline v0_2::shared_memory
