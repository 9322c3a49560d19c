// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "gathered.hpp"

namespace gradsync::inline v0_2 {

/// Top-k sparsification: every rank sends the elements of largest magnitude of each bucket, with their indices, and
/// keeps the rest as residual (Aji and Heafield, arXiv 1704.05021; Stich et al., arXiv 1809.07599). An element sent
/// takes eight bytes, and all ranks gather all messages: `8 density N` bytes per rank, while an all-reduce takes about
/// `2 s N` for N elements of s bytes. So it suits few ranks and low densities. A bucket that would take more than an
/// all-reduce is not compressed.
///
/// Sums are in rank order, in f32. The selection depends on the other elements of the bucket, so other buckets give
/// other bits. An infinity or a NaN travels at once. If at least as many elements are infinite or NaN as travel, all of
/// the bucket is NaN in this step. See the concept `Compressor`.
struct TopK {
    double density = 0.01;         ///< the fraction of a bucket's elements that travel, in (0, 1]
    std::uint64_t start_step = 0;  ///< steps before this one are not compressed

    class Codec;
    template <Backend B>
    using Exchange = detail::GatheredExchange<B, TopK>;

    std::string describe() const {
        return detail::text("TopK{density=", detail::text_of(density), ", start_step=", start_step, "}");
    }
};

/// Internal. The words of a bucket are the indices of its largest elements, then their values.
class TopK::Codec {
    using Bucket = detail::GatheredBucket;

public:
    explicit Codec(const TopK& settings) : density_(settings.density) {
        if (!(density_ > 0 && density_ <= 1))
            detail::refuse(
                "TopK", detail::text("the density must be more than 0 and 1 at most, not ", std::to_string(density_)));
    }

    std::size_t words(const Bucket& bucket, const BucketContents& contents, std::size_t b, int rank) {
        if (contents.count > std::numeric_limits<std::uint32_t>::max())
            detail::raise(Errc::invalid_argument,
                          detail::text("TopK: a bucket has ", contents.count,
                                       " elements, and 2^32 - 1 is the most; use SizeCappedBuckets"),
                          {.operation = "TopK", .rank = rank, .bucket = static_cast<std::ptrdiff_t>(b)});
        if (contents.dtype != DType::f32) sums_.resize(detail::larger(sums_.size(), contents.count));
        const auto k = static_cast<std::size_t>(density_ * static_cast<double>(bucket.elements));
        return k == 0 && bucket.elements != 0 ? 2 : 2 * k;
    }

    bool write(const Bucket& bucket, float* held, std::size_t count, std::uint32_t* words) const {
        const std::size_t k = bucket.words / 2;
        auto* const values = reinterpret_cast<float*>(words + k);
        kernel::take_largest(held, count, k, words, values);
        for (const float x : std::span(values, k))
            if (detail::is_finite(x)) return true;
        return false;  // more elements may be infinite or NaN than travel
    }

    void put_back(const Bucket& bucket, const std::uint32_t* words, float* held) const noexcept {
        const std::size_t k = bucket.words / 2;
        const auto* const values = reinterpret_cast<const float*>(words + k);
        for (std::size_t e = 0; e < k; ++e)
            if (words[e] < bucket.count && detail::is_finite(values[e])) held[words[e]] = values[e];
    }

    void add_up(const Bucket& bucket, const detail::Messages& messages, float factor, BufferView to, auto&& hand_out) {
        const std::size_t k = bucket.words / 2;
        float* const sums = to.dtype == DType::f32 ? static_cast<float*>(to.data) : sums_.data();
        std::memset(sums, 0, to.count * sizeof(float));
        for (std::size_t r = 0; r < messages.count; ++r) {
            const std::uint32_t* const places = messages.of(r);
            const auto* const values = reinterpret_cast<const float*>(places + k);
            for (std::size_t e = 0; e < k; ++e) {
                if (places[e] >= to.count)
                    detail::raise(Errc::peer_failed,
                                  detail::text("TopK: rank ", r, " sent an element number ", places[e],
                                               " of a bucket of ", to.count, "; all ranks must run the same program"),
                                  {.operation = "TopK", .peer = static_cast<int>(r)});
                float value = values[e] * factor;
                kernel::detail::round_now(value);
                sums[places[e]] += value;
            }
        }
        hand_out(0, ConstBufferView{sums, to.count}, to);
    }

private:
    double density_;
    std::vector<float> sums_;  ///< sums of a bucket of low precision, in f32
};

}  // namespace gradsync::inline v0_2
