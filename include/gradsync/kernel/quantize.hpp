// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <limits>

#include "elementwise.hpp"
#include "largest.hpp"

/// @file
/// Quantization to a few bits per element. Elements form blocks of `quantized_block`; the last one may be shorter. A
/// block is written as its step, an f32, and one level per element, in whole 32-bit words; an element is about
/// level * step. Products are rounded before they are added, so that the results have the same bits on every processor.
///
/// | bits | a level is | the step |
/// |---|---|---|
/// | 8 | -127 to 127 | a 127th of the largest magnitude |
/// | 4 | -7 to 7 | a 7th of it |
/// | 1 | -1 or 1, the sign | the mean magnitude |
///
/// The step of a block with an infinity or a NaN is NaN, and so is every element that is read from it.

namespace gradsync::inline v0_2::kernel {

inline constexpr std::size_t quantized_block = 256;

/// The number of 32-bit words that `count` elements take.
constexpr std::size_t quantized_words(std::size_t count, unsigned bits) noexcept {
    const std::size_t rest = count % quantized_block;
    return count / quantized_block * (1 + quantized_block * bits / 32) + (rest == 0 ? 0 : 1 + (rest * bits + 31) / 32);
}

namespace detail {

/// Writes and reads the levels of a block of n elements. A byte holds one level of each part of the block:
/// the whole, two halves or eight eighths. The first part has loops of its own, so that with one part or two
/// the compiler knows every shift.
template <unsigned bits>
struct Levels {
    static constexpr int most = bits == 1 ? 1 : (1 << (bits - 1)) - 1;

    GRADSYNC_ALWAYS_INLINE static void write(const int* levels, std::size_t n, std::uint8_t* bytes) {
        const std::size_t part = (n * bits + 7) / 8;
        for (std::size_t i = 0; i < part; ++i) bytes[i] = static_cast<std::uint8_t>(code_of(levels[i]));
        for (unsigned k = 1; k < 8 / bits && k * part < n; ++k) {
            const int* const of_part = levels + k * part;
            const std::size_t m = n - k * part < part ? n - k * part : part;
            for (std::size_t i = 0; i < m; ++i)
                bytes[i] = static_cast<std::uint8_t>(bytes[i] | code_of(of_part[i]) << k * bits);
        }
    }
    GRADSYNC_ALWAYS_INLINE static void read(const std::uint8_t* bytes, std::size_t n, float step, float* to) {
        const std::size_t part = (n * bits + 7) / 8;
        for (std::size_t i = 0; i < part; ++i) to[i] = value_of(bytes[i], step);
        for (unsigned k = 1; k < 8 / bits && k * part < n; ++k) {
            float* const of_part = to + k * part;
            const std::size_t m = n - k * part < part ? n - k * part : part;
            for (std::size_t i = 0; i < m; ++i) of_part[i] = value_of(bytes[i] >> k * bits, step);
        }
    }

private:
    // With 4 bits, levels are above -8; with 1 bit, the bit is the sign.
    GRADSYNC_ALWAYS_INLINE static int code_of(int level) {
        return bits == 8 ? level : bits == 4 ? level + 8 : level < 0 ? 1 : 0;
    }
    GRADSYNC_ALWAYS_INLINE static float value_of(int code, float step) {
        if constexpr (bits == 1)
            return std::bit_cast<float>(std::bit_cast<std::uint32_t>(step) ^ static_cast<std::uint32_t>(code & 1)
                                                                                 << 31);
        else return static_cast<float>(bits == 8 ? static_cast<std::int8_t>(code) : (code & 15) - 8) * step;
    }
};

/// Quantizes block by block; whole blocks have a size that the compiler knows.
template <unsigned bits>
struct Quantize {
    GRADSYNC_ALWAYS_INLINE static void run(float* data, std::size_t count, std::uint32_t* words) {
        std::size_t first = 0;
        for (; first + quantized_block <= count;
             first += quantized_block, words += quantized_words(quantized_block, bits))
            block(data + first, quantized_block, words);
        if (first < count) block(data + first, count - first, words);
    }

private:
    static constexpr std::uint32_t infinity_bits = 0x7f800000;

    GRADSYNC_ALWAYS_INLINE static void block(float* x, std::size_t n, std::uint32_t* words) {
        const float step = step_of(x, n);
        std::memcpy(words, &step, sizeof step);
        const std::uint32_t step_bits = std::bit_cast<std::uint32_t>(step);
        const bool lost = step_bits > infinity_bits;
        const float inverse = lost || step_bits == 0 ? 0 : 1 / step;
        if (lost)
            for (std::size_t i = 0; i < n; ++i) x[i] = 0;
        alignas(64) float steps[quantized_block] = {};
        for (std::size_t i = 0; i < n; ++i) steps[i] = x[i] * inverse;
        round_now(steps);
        int levels[quantized_block];
        for (std::size_t i = 0; i < n; ++i) levels[i] = bits == 1 ? sign_of(x[i]) : nearest_level(steps[i]);
        const std::size_t of_levels = (n * bits + 7) / 8, size = (of_levels + 3) / 4 * 4;
        std::uint8_t bytes[quantized_block];
        Levels<bits>::write(levels, n, bytes);
        for (std::size_t i = of_levels; i < size; ++i) bytes[i] = 0;
        std::memcpy(words + 1, bytes, size);
        if (lost) return;
        // The remainder stays in x.
        alignas(64) float read[quantized_block];
        Levels<bits>::read(bytes, n, step, read);
        round_now(read);
        for (std::size_t i = 0; i < n; ++i) x[i] -= read[i];
    }

    /// The step of a block; 0 if it would be denormal.
    GRADSYNC_ALWAYS_INLINE static float step_of(const float* x, std::size_t n) {
        std::uint32_t largest = 0;
        for (std::size_t i = 0; i < n; ++i) largest = largest < magnitude_bits(x[i]) ? magnitude_bits(x[i]) : largest;
        if (largest >= infinity_bits) return std::numeric_limits<float>::quiet_NaN();
        float step = std::bit_cast<float>(largest) / Levels<bits>::most;
        if constexpr (bits == 1) step = mean_magnitude(x, n);
        // Slightly less than the quotient, so that rounding does not make it infinite.
        constexpr float limit =
            std::numeric_limits<float>::max() / Levels<bits>::most * (1 - std::numeric_limits<float>::epsilon());
        return step < std::numeric_limits<float>::min() ? 0 : step < limit ? step : limit;
    }
    GRADSYNC_ALWAYS_INLINE static float mean_magnitude(const float* x, std::size_t n) {
        constexpr std::size_t lanes = 16;
        const float part = 1 / static_cast<float>(n);
        // Divided before they are added, so that the sum does not overflow.
        alignas(64) float parts[quantized_block] = {};
        for (std::size_t i = 0; i < n; ++i) parts[i] = std::bit_cast<float>(magnitude_bits(x[i])) * part;
        round_now(parts);
        float sums[lanes] = {};
        for (std::size_t first = 0; first < quantized_block; first += lanes)
            for (std::size_t k = 0; k < lanes; ++k) sums[k] += parts[first + k];
        float mean = 0;
        for (const float sum : sums) mean += sum;
        return mean;
    }
    GRADSYNC_ALWAYS_INLINE static int sign_of(float x) { return std::bit_cast<std::uint32_t>(x) >> 31 != 0 ? -1 : 1; }
    GRADSYNC_ALWAYS_INLINE static int nearest_level(float steps) {
        const int level = static_cast<int>(steps + (steps < 0 ? -0.5f : 0.5f));
        return level > Levels<bits>::most    ? Levels<bits>::most
               : level < -Levels<bits>::most ? -Levels<bits>::most
                                             : level;
    }
};

template <unsigned bits>
struct SumQuantized {
    GRADSYNC_ALWAYS_INLINE static void run(const std::uint32_t* words, std::size_t stride, std::size_t messages,
                                           std::size_t count, float factor, float* sums) {
        std::size_t first = 0;
        for (; first + quantized_block <= count;
             first += quantized_block, words += quantized_words(quantized_block, bits))
            block(words, stride, messages, quantized_block, factor, sums + first);
        if (first < count) block(words, stride, messages, count - first, factor, sums + first);
    }

private:
    GRADSYNC_ALWAYS_INLINE static void block(const std::uint32_t* words, std::size_t stride, std::size_t messages,
                                             std::size_t n, float factor, float* to) {
        alignas(64) float sum[quantized_block] = {};
        for (std::size_t r = 0; r < messages; ++r, words += stride) {
            float step;
            std::memcpy(&step, words, sizeof step);
            step *= factor;
            round_now(step);
            std::uint8_t bytes[quantized_block];
            std::memcpy(bytes, words + 1, (n * bits + 7) / 8);
            alignas(64) float read[quantized_block];
            Levels<bits>::read(bytes, n, step, read);
            round_now(read);
            for (std::size_t i = 0; i < n; ++i) sum[i] += read[i];
        }
        for (std::size_t i = 0; i < n; ++i) to[i] = sum[i];
    }
};

template <template <unsigned> class Kernel, class... Args>
void dispatch_bits(unsigned bits, Args... args) {
    switch (bits) {
        case 1: return dispatch<Kernel<1>>(args...);
        case 4: return dispatch<Kernel<4>>(args...);
        default: return dispatch<Kernel<8>>(args...);
    }
}

}  // namespace detail

/// Writes `data` as `quantized_words(count, bits)` words, and leaves the remainder, data - levels * step, in `data`. A
/// block with an element that is not finite leaves zeros. A block whose step would be denormal leaves all its elements.
/// `bits` is 1, 4 or 8.
inline void quantize(float* data, std::size_t count, unsigned bits, std::uint32_t* words) {
    detail::dispatch_bits<detail::Quantize>(bits, data, count, words);
}

/// sums[i] = factor * the sum of element i over `messages` quantized messages of `count` elements, in order. Message r
/// begins at word r * stride. `bits` is 1, 4 or 8.
inline void sum_quantized(const std::uint32_t* words, std::size_t stride, std::size_t messages, std::size_t count,
                          unsigned bits, float factor, float* sums) {
    detail::dispatch_bits<detail::SumQuantized>(bits, words, stride, messages, count, factor, sums);
}

}  // namespace gradsync::inline v0_2::kernel
