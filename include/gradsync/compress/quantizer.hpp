// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../kernel/quantize.hpp"
#include "gathered.hpp"

namespace gradsync::inline v0_2 {

/// Quantization: every element travels in 8, 4 or 1 bits, as a multiple of a step that 256 elements of a parameter
/// share. The rounding error stays as residual. With 1 bit, signs and mean magnitudes travel (Seide et al., 1-bit SGD,
/// 2014; Karimireddy et al., arXiv 1901.09847). With more bits, levels are evenly spaced between the largest magnitude
/// and its negative, as in Alistarh et al., arXiv 1610.02132, but rounded to the nearest: error feedback replaces their
/// random rounding.
///
/// All ranks gather all messages: about `N bits / 8` bytes per rank, while an all-reduce takes about `2 s N` for N
/// elements of s bytes. So it suits few ranks: among 4 ranks with f32, 8 bits halve the traffic, and 1 bit reduces it
/// to a sixteenth. A bucket that would take more than an all-reduce is not compressed.
///
/// Sums are in rank order, in f32. If all buckets are compressed, the bits depend on neither buckets nor overlap.
/// A block with an infinity or a NaN is all NaN on every rank in this step, and its residual is cleared.
/// See the concept `Compressor`.
struct Quantizer {
    unsigned bits = 8;             ///< bits per element: 8, 4 or 1
    std::uint64_t start_step = 0;  ///< steps before this one are not compressed

    class Codec;
    template <Backend B>
    using Exchange = detail::GatheredExchange<B, Quantizer>;

    std::string describe() const { return detail::text("Quantizer{bits=", bits, ", start_step=", start_step, "}"); }
};

/// Internal. The words of a bucket are those of its parameters, one after the other; see kernel/quantize.hpp.
class Quantizer::Codec {
    using Bucket = detail::GatheredBucket;

public:
    explicit Codec(const Quantizer& settings) : bits_(settings.bits) {
        if (bits_ != 8 && bits_ != 4 && bits_ != 1)
            detail::refuse("Quantizer", "an element has 8, 4 or 1 bits, not ", bits_);
    }

    std::size_t words(const Bucket& bucket) const noexcept {
        std::size_t words = 0;
        for (const detail::NumbersOf& part : bucket.parts) words += kernel::quantized_words(part.count, bits_);
        return words;
    }

    void write(const Bucket& bucket, float* held, std::uint32_t* words) const {
        for (const detail::NumbersOf& part : bucket.parts) {
            kernel::quantize(held + part.first, part.count, bits_, words);
            words += kernel::quantized_words(part.count, bits_);
        }
    }

    void put_back(const Bucket& bucket, const std::uint32_t* words, float* held) const {
        for_blocks(bucket, {words, 0, 1}, 1, [&](std::size_t offset, ConstBufferView block) {
            if (detail::is_finite(*static_cast<const float*>(block.data)))
                kernel::add(BufferView{held + offset, block.count}, block);
        });
    }

    void add_up(const Bucket& bucket, const detail::Messages& messages, float factor, BufferView to,
                auto&& hand_out) const {
        for_blocks(bucket, messages, factor, [&](std::size_t offset, ConstBufferView block) {
            hand_out(offset, block, to.subview(offset, block.count));
        });
    }

private:
    /// Calls `visit(offset, sums)` for each block of the bucket, with its offset and its sums over the messages.
    template <class Visit>
    void for_blocks(const Bucket& bucket, const detail::Messages& messages, float factor, Visit&& visit) const {
        constexpr std::size_t most = kernel::quantized_block;
        std::size_t word = 0;
        for (const detail::NumbersOf& part : bucket.parts) {
            for (std::size_t first = 0; first < part.count; first += most) {
                alignas(64) float sums[most];
                const std::size_t n = detail::smaller(most, part.count - first);
                kernel::sum_quantized(messages.first + word, messages.stride, messages.count, n, bits_, factor, sums);
                word += kernel::quantized_words(n, bits_);
                visit(part.first + first, ConstBufferView{sums, n});
            }
        }
    }

    unsigned bits_;
};

}  // namespace gradsync::inline v0_2
