// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "gathered.hpp"

namespace gradsync::inline v0_2 {

namespace detail {
class TopKCodec;
}

/// Top-k sparsification: every rank sends the elements of largest magnitude of each bucket, with their indices, and keeps the rest as
/// residual (Aji and Heafield, arXiv 1704.05021; Stich et al., arXiv 1809.07599). An element sent takes eight bytes, and all ranks gather
/// all messages: `8 density N` bytes per rank, while an all-reduce takes about `2 s N` for N elements of s bytes. So it suits few ranks and
/// low densities. A bucket that would take more than an all-reduce is not compressed.
///
/// Sums are in rank order, in f32. The selection depends on the other elements of the bucket, so other buckets give other bits. An infinity
/// or a NaN travels at once. If at least as many elements are infinite or NaN as travel, all of the bucket is NaN in this step. See the
/// concept `Compressor`.
struct TopK {
    double density = 0.01;         ///< the fraction of a bucket's elements that travel, in (0, 1]
    std::uint64_t start_step = 0;  ///< steps before this one are not compressed

    template <Backend B>
    using Exchange = detail::GatheredExchange<B, TopK, detail::TopKCodec>;

    std::string describe() const { return detail::text("TopK{density=", detail::text_of(density), ", start_step=", start_step, "}"); }
};

namespace detail {

/// The words of a bucket are the indices of its largest elements, then their values.
class TopKCodec {
public:
    explicit TopKCodec(const TopK& settings) : density_(settings.density) {
        if (!(density_ > 0 && density_ <= 1))
            refuse("TopK", text("the density must be more than 0 and 1 at most, not ", std::to_string(density_)));
    }

    void adopt_plan(std::span<const BucketContents> contents, int rank) {
        k_.assign(contents.size(), 0);
        std::size_t largest = 0;
        for (std::size_t b = 0; b < contents.size(); ++b) {
            if (!is_compressible(contents[b].dtype)) continue;
            std::size_t elements = 0;
            for (const BucketContents::Part& part : contents[b].parts) elements += part.count;
            if (contents[b].count > std::numeric_limits<std::uint32_t>::max())
                raise(Errc::invalid_argument,
                      text("TopK: a bucket has ", contents[b].count, " elements, and 2^32 - 1 is the most; use SizeCappedBuckets"),
                      {.operation = "TopK", .rank = rank, .bucket = static_cast<std::ptrdiff_t>(b)});
            k_[b] = static_cast<std::size_t>(density_ * static_cast<double>(elements));
            if (k_[b] == 0 && elements != 0) k_[b] = 1;
            if (contents[b].dtype != DType::f32) largest = larger(largest, contents[b].count);
        }
        sums_.resize(largest);
    }

    std::size_t words(std::size_t b) const noexcept { return 2 * k_[b]; }

    bool write(std::size_t b, float* held, std::size_t count, std::uint32_t* words) const {
        float* const values = values_of(b, words);
        kernel::take_largest(held, count, k_[b], words, values);
        for (const float x : std::span(values, k_[b]))
            if (is_finite(x)) return true;
        return false;  // more elements may be infinite or NaN than travel
    }

    void put_back(std::size_t b, const std::uint32_t* words, float* held) const noexcept {
        const float* const values = values_of(b, words);
        for (std::size_t e = 0; e < k_[b]; ++e)
            if (is_finite(values[e])) held[words[e]] = values[e];
    }

    void add_up(std::size_t b, const Messages& messages, float factor, BufferView bucket) {
        float* const sums = bucket.dtype == DType::f32 ? static_cast<float*>(bucket.data) : sums_.data();
        std::memset(sums, 0, bucket.count * sizeof(float));
        for (std::size_t r = 0; r < messages.count; ++r) {
            const std::uint32_t* const places = messages.of(r);
            const float* const values = values_of(b, places);
            for (std::size_t e = 0; e < k_[b]; ++e) {
                float value = values[e] * factor;
                kernel::detail::round_now(value);
                sums[places[e]] += value;
            }
        }
        kernel::copy(ConstBufferView{sums, bucket.count}, bucket);
    }

private:
    float* values_of(std::size_t b, std::uint32_t* words) const noexcept { return reinterpret_cast<float*>(words + k_[b]); }
    const float* values_of(std::size_t b, const std::uint32_t* words) const noexcept {
        return reinterpret_cast<const float*>(words + k_[b]);
    }

    double density_;
    std::vector<std::size_t> k_;  ///< by bucket: number of elements that travel
    std::vector<float> sums_;     ///< sums of a bucket of low precision, in f32
};

}  // namespace detail

}  // namespace gradsync::inline v0_2
