// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../kernel/quantize.hpp"
#include "gathered.hpp"

namespace gradsync::inline v0_2 {

namespace detail {
class QuantizerCodec;
}

/// Quantization: every element travels in 8, 4 or 1 bits, as a multiple of a step that 256 elements of a parameter share. The rounding
/// error stays as residual. With 1 bit, signs and mean magnitudes travel (Seide et al., 1-bit SGD, 2014; Karimireddy et al., arXiv
/// 1901.09847). With more bits, levels are evenly spaced between the largest magnitude and its negative, as in Alistarh et al., arXiv
/// 1610.02132, but rounded to the nearest: error feedback replaces their random rounding.
///
/// All ranks gather all messages: about `N bits / 8` bytes per rank, while an all-reduce takes about `2 s N` for N elements of s bytes. So
/// it suits few ranks: among 4 ranks with f32, 8 bits halve the traffic, and 1 bit reduces it to a sixteenth. A bucket that would take more
/// than an all-reduce is not compressed.
///
/// Sums are in rank order, in f32. If all buckets are compressed, the bits depend on neither buckets nor overlap. A block with an infinity
/// or a NaN is all NaN on every rank in this step, and its residual is cleared. See the concept `Compressor`.
struct Quantizer {
    unsigned bits = 8;             ///< bits per element: 8, 4 or 1
    std::uint64_t start_step = 0;  ///< steps before this one are not compressed

    template <Backend B>
    using Exchange = detail::GatheredExchange<B, Quantizer, detail::QuantizerCodec>;

    std::string describe() const { return detail::text("Quantizer{bits=", bits, ", start_step=", start_step, "}"); }
};

namespace detail {

/// The words of a bucket are those of its parameters, one after the other; see kernel/quantize.hpp.
class QuantizerCodec {
public:
    explicit QuantizerCodec(const Quantizer& settings) : bits_(settings.bits) {
        if (bits_ != 8 && bits_ != 4 && bits_ != 1) refuse("Quantizer", text("an element has 8, 4 or 1 bits, not ", bits_));
    }

    void adopt_plan(std::span<const BucketContents> contents, int) {
        buckets_.assign(contents.size(), {});
        for (std::size_t b = 0; b < contents.size(); ++b)
            for (const BucketContents::Part& part : contents[b].parts) {
                buckets_[b].parts.push_back({part.offset, part.count, buckets_[b].words});
                buckets_[b].words += kernel::quantized_words(part.count, bits_);
            }
    }

    std::size_t words(std::size_t b) const noexcept { return buckets_[b].words; }

    bool write(std::size_t b, float* held, std::size_t, std::uint32_t* words) const {
        for (const Part& part : buckets_[b].parts) kernel::quantize(held + part.offset, part.count, bits_, words + part.word);
        return true;  // a block that is not finite is marked in its own words
    }

    void put_back(std::size_t b, const std::uint32_t* words, float* held) const {
        for_blocks(b, Messages{words, 0, 1}, 1, [&](std::size_t offset, ConstBufferView block) {
            if (is_finite(*static_cast<const float*>(block.data))) kernel::add(BufferView{held + offset, block.count}, block);
        });
    }

    void add_up(std::size_t b, const Messages& messages, float factor, BufferView bucket) const {
        for_blocks(b, messages, factor,
                   [&](std::size_t offset, ConstBufferView block) { kernel::copy(block, bucket.subview(offset, block.count)); });
    }

private:
    struct Part {
        std::size_t offset = 0, count = 0;  ///< in the bucket
        std::size_t word = 0;               ///< index of its first word
    };
    struct Bucket {
        std::vector<Part> parts;
        std::size_t words = 0;
    };

    /// Calls `visit(offset, sums)` for each block of the bucket, with its offset and its sums over the messages.
    template <class Visit>
    void for_blocks(std::size_t b, const Messages& messages, float factor, Visit&& visit) const {
        constexpr std::size_t most = kernel::quantized_block;
        for (const Part& part : buckets_[b].parts) {
            std::size_t word = part.word;
            for (std::size_t first = 0; first < part.count; first += most) {
                alignas(64) float sums[most];
                const std::size_t n = smaller(most, part.count - first);
                kernel::sum_quantized(messages.first + word, messages.stride, messages.count, n, bits_, factor, sums);
                word += kernel::quantized_words(n, bits_);
                visit(part.offset + first, ConstBufferView{sums, n});
            }
        }
    }

    unsigned bits_;
    std::vector<Bucket> buckets_;
};

}  // namespace detail

}  // namespace gradsync::inline v0_2
