// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <limits>

#include "../kernel/passes.hpp"
#include "compressor.hpp"
#include "staged_work.hpp"

namespace gradsync::inline v0_2::detail {

/// The messages of all ranks for one bucket.
struct Messages {
    const std::uint32_t* first = nullptr;  ///< rank 0's message
    std::size_t stride = 0;                ///< words from one message to the next
    std::size_t count = 0;
};

/// A bucket as a codec sees it.
struct GatheredBucket {
    std::vector<NumbersOf> parts = {};  ///< places of its parameters; the gaps stay zero
    std::size_t elements = 0;           ///< elements of all parts together
    std::size_t words = 0;              ///< words of a rank's message
    std::size_t count = 0;              ///< elements of the bucket, gaps included
};

/// A compressor by all-gather: each rank writes the same number of words per bucket, all ranks gather them, and each
/// adds them up in rank order. A bucket whose messages would exceed the traffic of an all-reduce is not compressed.
///
/// `Settings` has `start_step`, `describe()` and a nested class `Codec`, which defines the words. A Codec is made of
/// the settings, and throws Error(invalid_argument) for bad ones. It has these const members, where `bucket` is a
/// `const GatheredBucket&`, `held` a `float*` and `words` a `std::uint32_t*`. They touch elements of `bucket.parts`
/// only.
/// - `words(bucket)`: the number of words of a message;
/// - `write(bucket, held, words)`: moves what is sent from `held`, all elements of the bucket in f32, to `words`. An
///   infinity or NaN must be sent, so that no rank gets a finite result, and must not stay in `held`;
/// - `put_back(bucket, words, held)`: adds the finite elements that `write` took back to `held`; other ranks may have
///   changed `words`;
/// - `add_up(bucket, messages, factor, to, hand_out)`: calls `hand_out(first, sums, part)` for consecutive parts of
///   `to`, from element `first` on, with factor times the sum of all messages in f32. Elements that no message mentions
///   become 0; gaps between parameters may stay as they are. A message whose words are all 0 mentions nothing.
template <Backend B, class Settings>
class GatheredExchange : public CompressedExchange<B, Settings> {
    using Base = CompressedExchange<B, Settings>;
    using Base::computed_, Base::residuals_;

public:
    explicit GatheredExchange(const Settings& settings) : Base(settings), codec_(settings) {}

    /// The second stage: adds up the gathered words.
    struct Sum {
        GatheredExchange* owner = nullptr;
        std::size_t b = 0;
        BufferView bucket;
        double weight = 1, unit = 1;  ///< weight of this rank, and unit of its residual; see ErrorFeedback

        bool next(typename B::WorkType& work) {
            work = {};
            owner->sum(b, bucket, weight, unit);
            return false;
        }
        void drop() noexcept {}  // no other rank waits for this stage
    };

    template <class>
    using WorkType = StagedWork<typename B::WorkType, Sum>;

    void adopt_plan(B& backend, std::span<const BucketContents> contents) {
        size_ = static_cast<std::size_t>(backend.size());
        rank_ = static_cast<std::size_t>(backend.rank());
        Base::adopt(contents);
        buckets_.assign(contents.size(), {});
        std::size_t words = 0;
        for (std::size_t b = 0; b < contents.size(); ++b) {
            Bucket& bucket = buckets_[b];
            bucket.count = contents[b].count;
            if (!is_compressible(contents[b].dtype)) continue;
            for (const BucketContents::Part& part : contents[b].parts) {
                bucket.elements += part.count;
                bucket.parts.push_back({part.offset, part.count});
            }
            bucket.words = codec_.words(bucket);
            const std::size_t own = weight_words + bucket.words;
            if (own * size_ * sizeof(std::uint32_t) >= 2 * bucket.elements * size_of(contents[b].dtype)) continue;
            bucket.message = own;
            bucket.first = words;
            words += in_lines_of_floats(own * size_);
        }
        gathered_ = backend.allocate(words * sizeof(std::uint32_t));
    }

    WorkType<B> start(B& backend, std::size_t b, BufferView bucket, ReduceOp op, Contribution contribution) {
        if (!Base::compresses(backend, b, bucket, contribution, [&] { return buckets_[b].message != 0; }))
            return WorkType<B>(backend.all_reduce(bucket, op, contribution));
        const Bucket& own = buckets_[b];
        std::uint32_t* const message = message_of(own, rank_);
        const double unit = Base::hold(b, bucket, contribution, message, own.message * sizeof(std::uint32_t));
        if (unit != 0) codec_.write(own, residuals_.bucket(b), message + weight_words);
        std::memcpy(message, &contribution.weight, sizeof(double));
        const BufferView all = detail::typed_view(message_of(own, 0), own.message * size_, DType::i32);
        return WorkType<B>(backend.all_gather(all.subview(own.message * rank_, own.message), all),
                           Sum{this, b, bucket, contribution.weight, unit});
    }

    Traffic traffic(const B&, std::size_t b, BufferView bucket) const noexcept {
        const std::size_t words = buckets_[b].message;
        return {words == 0 || Base::was_early(b) ? bucket.bytes() : words * size_ * sizeof(std::uint32_t), 1};
    }

private:
    static constexpr std::size_t weight_words = sizeof(double) / sizeof(std::uint32_t);

    struct Bucket : GatheredBucket {
        std::size_t message = 0;  ///< words of a rank's message, its weight included; 0: the bucket travels whole
        std::size_t first = 0;    ///< index of its messages in `gathered_`
    };

    std::uint32_t* message_of(const Bucket& bucket, std::size_t rank) const noexcept {
        return static_cast<std::uint32_t*>(gathered_.data()) + bucket.first + rank * bucket.message;
    }

    void sum(std::size_t b, BufferView bucket, double own_weight, double unit) {
        const auto begin = std::chrono::steady_clock::now();
        const Bucket& own = buckets_[b];
        double weights = 0;
        for (std::size_t r = 0; r < size_; ++r) {
            double weight;
            std::memcpy(&weight, message_of(own, r), sizeof weight);
            weights += weight;
        }
        const bool lost = !is_finite(weights);  // checked first: under -ffast-math a NaN may be equal to 0
        if (lost || weights == 0) {
            // A mean without weight is 0, as in AllReduce. Elements that were about to travel return to the residual.
            if (unit != 0) codec_.put_back(own, message_of(own, rank_) + weight_words, residuals_.bucket(b));
            for (const NumbersOf& part : own.parts)
                fill(bucket.subview(part.first, part.count), lost ? std::numeric_limits<float>::quiet_NaN() : 0.0f);
        } else {
            codec_.add_up(own, Messages{message_of(own, 0) + weight_words, own.message, size_},
                          static_cast<float>(1 / weights), bucket,
                          [&](std::size_t first, ConstBufferView sums, BufferView to) {
                              residuals_.hand_out(b, first, sums, to, own_weight);
                          });
        }
        if (unit != 0) residuals_.settle(b, bucket.count, unit);
        computed_ += std::chrono::steady_clock::now() - begin;
    }

    static void fill(BufferView bucket, float value) {
        alignas(64) float block[kernel::detail::elementwise_block];
        for (float& x : block) x = value;
        kernel::detail::for_blocks(bucket.count, [&](std::size_t first, std::size_t n) {
            kernel::copy(ConstBufferView{block, n}, bucket.subview(first, n));
        });
    }

    typename Settings::Codec codec_;
    std::size_t size_ = 1, rank_ = 0;
    std::vector<Bucket> buckets_;
    typename Base::Memory gathered_{};
};

}  // namespace gradsync::inline v0_2::detail
