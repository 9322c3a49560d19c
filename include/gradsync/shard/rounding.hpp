// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/buffer_view.hpp"
#include "../core/math.hpp"
#include "../kernel/isa.hpp"

namespace gradsync::inline v0_2 {

/// The argument of an optimizer's `round(slice)`: contiguous elements of one parameter whose weights
/// are narrower than its master weights. `round` writes every element of `rounded`. The library owns the memory,
/// which is valid during the call.
struct RoundingSlice {
    std::size_t parameter = 0;           ///< index of the parameter
    std::size_t first = 0;               ///< index of the slice's first element in the parameter
    std::span<const float> master = {};  ///< master weights
    BufferView rounded = {};             ///< `master.size()` elements of 16 or 8 bits
};

namespace detail {

struct RoundStochastically {
    /// Adds 16 random bits to the part that rounding drops, then drops it. The bits are a hash of the element's index
    /// and a key: two rounds of "multiply, xor, shift" with the constants of C. Wellons (Hash Prospector).
    GRADSYNC_ALWAYS_INLINE static void block(const float* __restrict master, std::uint16_t* __restrict rounded,
                                             std::uint32_t first, std::uint32_t key, std::uint32_t second_key,
                                             std::size_t n) {
        constexpr std::uint32_t largest = std::uint32_t{BFloat16::largest} << 16;
        for (std::size_t i = 0; i < n; ++i) {
            std::uint32_t hash = (first + static_cast<std::uint32_t>(i)) ^ key;
            hash = (hash ^ hash >> 16) * 0x21f0'aaadu;
            hash = (hash ^ hash >> 15) * 0xd35a'2d97u + second_key;
            hash = (hash ^ hash >> 16) * 0x21f0'aaadu;
            const auto bits = __builtin_bit_cast(std::uint32_t, master[i]);
            std::uint32_t nearest = 0, code = (bits + (hash >> 16)) >> 16;
            kernel::detail::narrow<BFloat16>(master[i], nearest);
            kernel::detail::replace_where((bits & 0x7fff'ffffu) > largest, nearest, code);
            rounded[i] = static_cast<std::uint16_t>(code);
        }
    }
    GRADSYNC_ALWAYS_INLINE static void run(const float* master, std::uint16_t* rounded, std::size_t first,
                                           std::uint64_t key, std::size_t n) {
        constexpr std::size_t length = 64;
        const auto low = static_cast<std::uint32_t>(key), high = static_cast<std::uint32_t>(key >> 32);
        std::size_t i = 0;
        for (; i + length <= n; i += length)
            block(master + i, rounded + i, static_cast<std::uint32_t>(first + i), low, high, length);
        block(master + i, rounded + i, static_cast<std::uint32_t>(first + i), low, high, n - i);
    }
};

}  // namespace detail

/// Rounds each number x to one of its two neighbours a < x < b in bf16, to b with probability (x - a) / (b - a), so
/// that the expected value is x (Gupta et al., arXiv 1502.02551). So weights follow updates that are smaller than half
/// their last place, which rounding to nearest loses. Numbers that bf16 can represent stay the same. Numbers beyond the
/// largest one, infinities and NaNs are rounded to nearest.
///
/// The choice depends only on `seed`, the parameter and the element (modulo 2^32), not on ranks or buckets. Pass
/// another seed in each step, such as a constant plus the optimizer's step count, which is saved with its state:
///
///     void round(const gradsync::RoundingSlice& s) const { gradsync::round_stochastically(s, seed + steps); }
///
/// Thread-safe. Throws Error(invalid_argument) unless `rounded` holds the same number of bf16 elements.
inline void round_stochastically(const RoundingSlice& slice, std::uint64_t seed) {
    if (slice.rounded.dtype != DType::bf16 || slice.rounded.count != slice.master.size())
        detail::raise(Errc::invalid_argument, "round_stochastically: ", slice.master.size(),
                      " numbers cannot be rounded to ", slice.rounded.count, " of ", slice.rounded.dtype,
                      "; give as many of bf16");
    std::uint64_t state = detail::split_mix(seed) + slice.parameter;
    kernel::dispatch<detail::RoundStochastically>(slice.master.data(), static_cast<std::uint16_t*>(slice.rounded.data),
                                                  slice.first, detail::split_mix(state), slice.master.size());
}

}  // namespace gradsync::inline v0_2
