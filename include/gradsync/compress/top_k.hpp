#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../core/backend.hpp"
#include "../core/clock.hpp"
#include "../kernel/largest.hpp"
#include "../reducer/passes.hpp"
#include "../reducer/staged_work.hpp"
#include "compressor.hpp"
#include "error_feedback.hpp"

namespace gradsync::inline v0 {

struct TopKOptions {
    double density = 0.01;         ///< the part of a bucket's elements that travel; within (0, 1]
    std::uint64_t start_step = 0;  ///< steps before this one are not compressed
};

/// Of each bucket every rank sends the elements of largest magnitude, with their places, and keeps the rest for later (Aji and Heafield, arXiv
/// 1704.05021; Stich et al., arXiv 1809.07599). Eight bytes an element sent, gathered by all: `8 density N` bytes a rank, where an
/// all-reduce takes about `2 s` for each element of s bytes. So it is for few ranks and little density; a bucket of which that would be more
/// than an all-reduce is not compressed.
///
/// Sums are in the order of the ranks, in f32. Which elements travel depends on what they share a bucket with: not the bits of other buckets.
/// An infinity or a NaN travels at once; where there are more such than elements travel, all of the bucket is NaN in this step. See the concept `Compressor`.
template <Backend B>
class TopK {
    static_assert(detail::compresses_on<B>());

public:
    static constexpr bool scatters = false;

    explicit TopK(TopKOptions options = {}) : options_(options) {
        if (!(options.density > 0 && options.density <= 1))
            throw Error(Errc::invalid_argument, "TopK: the density must be more than 0 and 1 at most, not " + std::to_string(options.density), {.operation = "TopK"});
    }
    // Its state is the Reducer's that it is given to: a copy begins anew.
    TopK(const TopK& other) : options_(other.options_) {}
    TopK& operator=(const TopK&) = delete;

    /// What follows when the ranks' elements are gathered.
    struct Spread {
        TopK* owner = nullptr;
        std::size_t b = 0;
        BufferView bucket;

        bool next(typename B::WorkType& work) {
            work = {};
            owner->spread(b, bucket);
            return false;
        }
        void drop() noexcept {}  // there is nothing that others could wait for
    };

    template <class>
    using WorkType = detail::StagedWork<typename B::WorkType, Spread>;

    void adopt_plan(B& backend, std::span<const BucketContents> contents) {
        size_ = backend.size();
        rank_ = backend.rank();
        residuals_.adopt_plan(contents);
        const std::uint64_t seen = steps();
        buckets_.assign(contents.size(), {});
        std::size_t words = 0, largest = 0;
        for (std::size_t b = 0; b < contents.size(); ++b) {
            Bucket& bucket = buckets_[b];
            bucket.steps = seen;
            if (!detail::is_compressible(contents[b].dtype)) continue;
            std::size_t elements = 0;
            for (const BucketContents::Part& part : contents[b].parts) elements += part.count;
            if (contents[b].count > std::numeric_limits<std::uint32_t>::max())
                throw Error(Errc::invalid_argument, "TopK: a bucket has " + std::to_string(contents[b].count) + " elements, and 2^32 - 1 is the most; use SizeCappedBuckets",
                            {.operation = "TopK", .rank = rank_, .bucket = static_cast<std::ptrdiff_t>(b)});
            const auto k = static_cast<std::size_t>(options_.density * static_cast<double>(elements));
            bucket.k = k == 0 && elements != 0 ? 1 : k;
            const std::size_t gathered = bucket.words() * static_cast<std::size_t>(size_);
            if (gathered * sizeof(std::int32_t) >= 2 * elements * size_of(contents[b].dtype)) bucket.k = 0;
            if (bucket.k == 0) continue;
            bucket.first = words;
            words += detail::in_lines_of_floats(gathered);
            if (contents[b].dtype != DType::f32) largest = detail::larger(largest, contents[b].count);
        }
        gathered_ = backend.allocate(words * sizeof(std::int32_t));
        sums_ = kernel::HostBuffer(largest * sizeof(float));
    }

    WorkType<B> start(B& backend, std::size_t b, BufferView bucket, ReduceOp op, Contribution contribution) {
        if (alone(backend)) return WorkType<B>(backend.all_reduce(bucket, op, contribution));
        Bucket& own = buckets_[b];
        const bool early = own.steps++ < options_.start_step;
        if (early || !detail::is_compressible(bucket.dtype)) return WorkType<B>(backend.all_reduce(bucket, op, contribution));
        if (own.k == 0) return WorkType<B>(backend.all_reduce(bucket, op, residuals_.release(b, bucket, contribution)));
        residuals_.add(b, bucket, contribution.scale);
        const Message message = message_of(own, rank_);
        kernel::take_largest(residuals_.bucket(b), bucket.count, own.k, message.places, message.values);
        double weight = contribution.weight;
        if (none_is_finite({message.values, own.k})) {  // there may be more such than travel: so all of the bucket
            residuals_.forget_infinite(b, bucket.count);
            weight = std::numeric_limits<double>::quiet_NaN();
        }
        std::memcpy(message.weight, &weight, sizeof weight);
        const BufferView all = {words(own), own.words() * static_cast<std::size_t>(size_), DType::i32};
        return WorkType<B>(backend.all_gather(all.subview(own.words() * static_cast<std::size_t>(rank_), own.words()), all), Spread{this, b, bucket});
    }

    template <class Any>
    bool alone(const Any& backend) const noexcept {
        return backend.size() == 1;
    }
    Traffic traffic(const B&, std::size_t b, BufferView bucket) const noexcept {
        const Bucket& own = buckets_[b];
        const bool whole = own.k == 0 || own.steps <= options_.start_step;
        return {whole ? bucket.bytes() : own.words() * static_cast<std::size_t>(size_) * sizeof(std::int32_t), 1};
    }
    std::chrono::nanoseconds progress_time() const noexcept { return computed_; }
    std::string describe() const { return "TopK{" + detail::text_of(options_.density) + "," + std::to_string(options_.start_step) + "}"; }

    BufferView residual(std::size_t i) const noexcept { return residuals_.parameter(i); }
    BufferView shared(std::size_t) const noexcept { return {}; }
    std::uint64_t steps() const noexcept { return buckets_.empty() ? 0 : buckets_.front().steps; }
    void set_steps(std::uint64_t n) noexcept {
        for (Bucket& bucket : buckets_) bucket.steps = n;
    }

private:
    struct Bucket {
        std::size_t k = 0;      ///< elements that travel; 0: all do
        std::size_t first = 0;  ///< of its words in `gathered_`
        std::uint64_t steps = 0;

        std::size_t words() const noexcept { return 2 + 2 * k; }  ///< of one rank
    };
    /// What a rank sends: its weight (two words), places, values.
    struct Message {
        std::int32_t* weight;
        std::uint32_t* places;
        float* values;
    };

    static bool none_is_finite(std::span<const float> values) noexcept {
        for (const float x : values)
            if (detail::is_finite(x)) return false;
        return true;
    }

    std::int32_t* words(const Bucket& bucket) const noexcept { return static_cast<std::int32_t*>(gathered_.data()) + bucket.first; }
    Message message_of(const Bucket& bucket, int rank) const noexcept {
        std::int32_t* const begin = words(bucket) + bucket.words() * static_cast<std::size_t>(rank);
        return {begin, reinterpret_cast<std::uint32_t*>(begin + 2), reinterpret_cast<float*>(begin + 2 + bucket.k)};
    }

    void spread(std::size_t b, BufferView bucket) {
        const auto begin = std::chrono::steady_clock::now();
        const Bucket& own = buckets_[b];
        float* const sums = static_cast<float*>(bucket.dtype == DType::f32 ? bucket.data : sums_.data());
        std::memset(sums, 0, bucket.count * sizeof(float));
        double weights = 0;
        for (int r = 0; r < size_; ++r) {
            double weight;
            std::memcpy(&weight, message_of(own, r).weight, sizeof weight);
            weights += weight;
        }
        const bool lost = !detail::is_finite(weights);  // asked first: under -ffast-math a NaN may be equal to 0
        const bool none = lost || weights == 0;
        if (none) {
            // As in AllReduce, a mean of no weight is 0. What was to travel stays.
            const Message message = message_of(own, rank_);
            for (std::size_t e = 0; e < own.k; ++e)
                if (detail::is_finite(message.values[e])) residuals_.bucket(b)[message.places[e]] = message.values[e];
            if (lost)
                for (std::size_t i = 0; i < bucket.count; ++i) sums[i] = std::numeric_limits<float>::quiet_NaN();
        }
        const auto factor = static_cast<float>(1 / (none ? 1 : weights));
        for (int r = 0; r < size_ && !none; ++r) {
            const Message message = message_of(own, r);
            for (std::size_t e = 0; e < own.k; ++e) {
                float value = message.values[e] * factor;
                kernel::detail::round_now(value);
                sums[message.places[e]] += value;
            }
        }
        kernel::copy(ConstBufferView{sums, bucket.count}, bucket);
        computed_ += std::chrono::steady_clock::now() - begin;
    }

    using Memory = decltype(std::declval<B&>().allocate(std::size_t{}));

    TopKOptions options_;
    int size_ = 1, rank_ = 0;
    detail::ErrorFeedback residuals_;
    std::vector<Bucket> buckets_;
    Memory gathered_{};
    kernel::HostBuffer sums_;  ///< of a bucket of low precision
    std::chrono::nanoseconds computed_{};
};

}  // namespace gradsync::inline v0
