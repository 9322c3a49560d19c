#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace gradsync::inline v0::kernel {

/// Takes the k elements of largest magnitude out of `data`: their places, ascending, and their values; they become 0 there. A NaN counts as
/// larger than all else; of equal magnitudes the first are taken. k <= count <= 2^32.
///
/// Exact, in three counting passes over the bits of the magnitudes (which are in the order of the numbers) and one that takes.
inline void take_largest(float* data, std::size_t count, std::size_t k, std::uint32_t* places, float* values) noexcept {
    if (k == 0) return;
    const auto magnitude = [](float x) { return std::bit_cast<std::uint32_t>(x) & 0x7fffffffu; };
    // Digit by digit from the top: which value has the k-th largest magnitude, and how many of those that have it are to be taken?
    struct Digit {
        unsigned shift, bits;
    };
    std::uint32_t prefix = 0;
    std::size_t wanted = k;
    for (const Digit digit : {Digit{20, 11}, Digit{10, 10}, Digit{0, 10}}) {
        std::size_t counts[2048] = {};
        const std::uint32_t mask = (1u << digit.bits) - 1;
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint32_t m = magnitude(data[i]);
            if (std::uint64_t{m} >> (digit.shift + digit.bits) == prefix) ++counts[m >> digit.shift & mask];
        }
        std::uint32_t value = mask;
        for (; counts[value] < wanted; --value) wanted -= counts[value];
        prefix = prefix << digit.bits | value;
    }
    std::size_t taken = 0;
    for (std::size_t i = 0; taken < k; ++i) {
        const std::uint32_t m = magnitude(data[i]);
        if (m < prefix || (m == prefix && wanted == 0)) continue;
        if (m == prefix) --wanted;
        places[taken] = static_cast<std::uint32_t>(i);
        values[taken++] = data[i];
        data[i] = 0;
    }
}

}  // namespace gradsync::inline v0::kernel
