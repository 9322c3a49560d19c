// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <mutex>
#include <optional>

#include "../../core/shared.hpp"
#include "../call.hpp"

namespace gradsync::inline v0_2::shared_memory {

using collective::Call;
using gradsync::detail::Shared;

/// The memory regions that this process shares with others, by numbers that are valid in all of them. An address in a
/// region travels as number and offset, in the 64 bits of a pointer. Thread-safe.
class Regions {
public:
    using WorldRanks = Shared<const List<int>>;

    static constexpr int offset_bits = 40;
    static constexpr std::size_t largest = std::size_t{1} << offset_bits;  ///< bytes of a region
    static constexpr std::uint32_t most = (std::uint32_t{1} << (64 - offset_bits)) - 2;

    /// Adds a region that `ranks` have mapped. `number` must be new, and is never reused. Throws
    /// Error(invalid_argument) if it is `most` or more, or if the region is too large.
    void add(std::uint32_t number, std::byte* base, std::size_t bytes, const WorldRanks& ranks) {
        if (bytes > largest) detail::refuse("allocate", "cannot share ", bytes, " bytes at once");
        if (number >= most)
            detail::refuse("allocate", number, " pieces of shared memory were made; make a new backend for more");
        std::lock_guard lock(mutex_);
        if (number >= bases_.size()) bases_.resize(number + 1);
        live_.push_back({base, bytes, number, 0, ranks});
        bases_[number] = base;
    }
    /// Declares that the memory of region `number` at `part`, `bytes` bytes, is also mapped at `base`.
    void add_alias(std::uint32_t number, const std::byte* part, std::byte* base, std::size_t bytes) {
        std::lock_guard lock(mutex_);
        for (const Mapping& live : live_)
            if (live.number == number)
                return live_.push_back(
                    {base, bytes, number, static_cast<std::size_t>(part - bases_[number]), WorldRanks(live.ranks)});
    }
    /// The region that holds this address.
    std::optional<std::uint32_t> number_of(const void* address) const noexcept {
        const void* published = nullptr;
        if (!publish(address, 1, {}, published)) return std::nullopt;
        return static_cast<std::uint32_t>((reinterpret_cast<std::uintptr_t>(published) >> offset_bits) - 1);
    }
    void remove(std::uint32_t number) noexcept {
        std::lock_guard lock(mutex_);
        bases_[number] = nullptr;
        live_.erase_if([&](const Mapping& live) { return live.number == number; });
    }

    /// Encodes `address`. Returns false if the `bytes` bytes do not all lie in one region that all of `readers`, world
    /// ranks, have mapped.
    bool publish(const void* address, std::size_t bytes, ListView<const int> readers,
                 const void*& published) const noexcept {
        const auto at = reinterpret_cast<std::uintptr_t>(address);
        std::lock_guard lock(mutex_);
        for (const Mapping& live : live_) {
            const auto base = reinterpret_cast<std::uintptr_t>(live.base);
            if (at < base || at - base > live.bytes || bytes > live.bytes - (at - base)) continue;
            if (!live.is_mapped_on(readers)) continue;
            published = reinterpret_cast<const void*>(((live.number + 1) << offset_bits) | (live.offset + (at - base)));
            return true;
        }
        return false;
    }

    const void* resolve(const void* published) const noexcept {
        const auto address = reinterpret_cast<std::uintptr_t>(published);
        if (address == 0) return nullptr;
        std::lock_guard lock(mutex_);
        return bases_[(address >> offset_bits) - 1] + (address & ((std::uintptr_t{1} << offset_bits) - 1));
    }

private:
    struct Mapping {
        std::byte* base;
        std::size_t bytes, number, offset;  ///< the region's memory from `offset` on
        WorldRanks ranks;

        bool is_mapped_on(ListView<const int> readers) const noexcept {
            if (readers.data() == ranks->data()) return true;  // the communicator that made the region
            std::size_t at = 0;                                // most lists have the same order
            for (const int reader : readers) {
                std::size_t left = ranks->size();
                for (; left != 0 && (*ranks)[at] != reader; --left) at = at + 1 == ranks->size() ? 0 : at + 1;
                if (left == 0) return false;
            }
            return true;
        }
    };

    mutable std::mutex mutex_;
    List<std::byte*> bases_;  ///< by number
    List<Mapping> live_;      ///< of the existing regions
};
static_assert(sizeof(void*) == 8, "an address travels as a number and an offset of 64 bits");

/// The address space of the ranks of a communicator: the regions that all of them have mapped.
/// A call with a buffer outside them is marked `elsewhere`: ranks only synchronise in it, and no data moves.
/// (A single rank can reach everything.)
class RegionSpace {
public:
    RegionSpace(Shared<const Regions> regions, Regions::WorldRanks ranks) noexcept
        : regions_(std::move(regions)), ranks_(std::move(ranks)), alone_(ranks_->size() == 1) {}

    Call publish(const Call& call) const noexcept {
        if (alone_) return call;
        Call published = call;
        const void* out = nullptr;
        published.in = nullptr;
        published.elsewhere = !find(call.in, call.in_count, call.dtype, published.in) ||
                              !find(call.out, call.out_count,
                                    call.operation == collective::Operation::reduce_step ? DType::u8 : call.dtype, out);
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
        return count == 0 || regions_->publish(address, count * size_of(dtype), *ranks_, published);
    }

    Shared<const Regions> regions_;
    Regions::WorldRanks ranks_;
    bool alone_;
};
}  // namespace gradsync::inline v0_2::shared_memory
