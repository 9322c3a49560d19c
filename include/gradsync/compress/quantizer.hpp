// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "../core/backend.hpp"
#include "../kernel/elementwise.hpp"
#include "../kernel/quantize.hpp"
#include "gathered.hpp"

namespace gradsync::inline v0_2 {

struct QuantizerOptions {
    unsigned bits = 8;             ///< of an element: 8, 4 or 1
    std::uint64_t start_step = 0;  ///< steps before this one are not compressed
};

namespace detail {

/// The words of a bucket are those of its parameters, one after the other, see kernel/quantize.hpp.
class QuantizerCodec {
public:
    explicit QuantizerCodec(unsigned bits) : bits_(bits) {
        if (bits != 8 && bits != 4 && bits != 1)
            throw Error(Errc::invalid_argument, "Quantizer: an element has 8, 4 or 1 bits, not " + std::to_string(bits),
                        {.operation = "Quantizer"});
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
        return true;  // a block says itself that it is lost
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
        std::size_t word = 0;               ///< the first of its words
    };
    struct Bucket {
        std::vector<Part> parts;
        std::size_t words = 0;
    };

    /// Calls `visit(offset, sums)` for each block of the bucket, where it begins and the sums of what the messages say of it.
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

/// Every element travels in 8, 4 or 1 bits, as a multiple of a step that 256 elements of a parameter share, and what that does not say is
/// kept for later: with 1 bit signs and mean magnitudes (Seide et al., 1-bit SGD, 2014; Karimireddy et al., arXiv 1901.09847), else as many
/// evenly spaced levels between the largest magnitude and its negative (as Alistarh et al., arXiv 1610.02132, but rounded to the nearest:
/// error feedback does what their dice do). Gathered by all: about `N bits / 8` bytes a rank, where an all-reduce takes about `2 s N` for
/// elements of s bytes. So it is for few ranks: 8 bits of f32 halve what travels among 4 ranks, 1 bit makes a sixteenth of it. A bucket of
/// which that would be more than an all-reduce is not compressed.
///
/// Sums are in the order of the ranks, in f32; the bits depend on neither buckets nor overlap, where all buckets are compressed. Where a
/// block has an infinity or a NaN, all of it is NaN on every rank in this step, and what was kept of it is forgotten. See the concept
/// `Compressor`.
template <Backend B>
class Quantizer : public detail::GatheredExchange<B, detail::QuantizerCodec> {
public:
    explicit Quantizer(QuantizerOptions options = {})
        : Quantizer::GatheredExchange(detail::QuantizerCodec(options.bits), options.start_step), options_(options) {}

    std::string describe() const { return "Quantizer{" + std::to_string(options_.bits) + "," + std::to_string(options_.start_step) + "}"; }

private:
    QuantizerOptions options_;
};

}  // namespace gradsync::inline v0_2
