// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <limits>
#include <optional>

#include "../kernel/low_rank.hpp"
#include "../kernel/passes.hpp"
#include "compressor.hpp"
#include "staged_work.hpp"

namespace gradsync::inline v0_2 {

/// Low-rank compression (Vogels, Karimireddy, Jaggi, PowerSGD, arXiv 1905.13727). A gradient of shape m x ... plus its
/// residual counts as a matrix M of m rows and n columns. With Q from the previous step, the ranks average P = M Q,
/// orthonormalise it, average Q = M^T P, and all get P Q^T. That is `rank (m + n)` numbers instead of `m n`, in two
/// all-reduces. Vectors, small matrices, and parameters without a `shape` travel whole, in f32, together with the P of
/// their bucket. A bucket that would not shrink is not compressed.
///
/// The residual of a rank is M - P (M^T P)^T, of its own M. Summed over the ranks, it is the sum of M minus what all
/// ranks got, as in the paper, where each rank subtracts the average. All computation is in f32. The bits depend on
/// neither buckets nor overlap, if the same holds for the backend and all buckets shrink. If a gradient that counts as
/// a matrix has an infinity or a NaN, all of that parameter is NaN on every rank in this step, and its residual is
/// cleared. See the concept `Compressor`.
struct PowerSgd {
    std::size_t rank = 1;             ///< rank of the matrices that travel instead; at least 1
    std::uint64_t start_step = 1000;  ///< steps before this one are not compressed: gradients change most at the start
    double min_compression_rate = 2;  ///< a matrix travels whole unless it shrinks by this factor
    std::uint64_t seed = 0;           ///< seed of the first guess; must be the same on all ranks

    template <Backend B>
    class Exchange;

    std::string describe() const {
        return detail::text("PowerSgd{rank=", rank, ", start_step=", start_step,
                            ", min_compression_rate=", detail::text_of(min_compression_rate), ", seed=", seed, "}");
    }
};

template <Backend B>
class PowerSgd::Exchange : public detail::CompressedExchange<B, PowerSgd> {
    using Base = detail::CompressedExchange<B, PowerSgd>;
    using Base::computed_, Base::residuals_, Base::settings_;
    using typename Base::Memory;

public:
    explicit Exchange(const PowerSgd& settings) : Base(settings) {
        if (settings.rank == 0) detail::refuse("PowerSgd", "the rank must be 1 at least");
        if (!(settings.min_compression_rate > 0))
            detail::refuse("PowerSgd", "min_compression_rate must be more than 0");
    }

    /// The stages after the average of P, and after that of Q.
    struct Rest {
        Exchange* owner = nullptr;
        std::size_t b = 0;
        BufferView bucket;
        double weight = 1, unit = 1;  ///< weight of this rank, and unit of its residual; see ErrorFeedback
        enum class Has { nothing, left, right } has = Has::nothing;

        /// If it throws, a thread that may communicate can repeat the call.
        bool next(typename B::WorkType& work) {
            if (has == Has::nothing) {
                owner->make_right(b, unit);
                has = Has::left;
            }
            if (has == Has::left) {
                const Bucket& own = owner->buckets_[b];
                work = owner->second_->all_reduce(BufferView{owner->right_.at(own.right), own.right_count},
                                                  ReduceOp::mean, {1, weight});
                has = Has::right;
                return true;
            }
            work = {};
            owner->expand(b, bucket, weight, unit);
            return false;
        }
        void drop() noexcept { owner->second_->fail("the exchange of a bucket was dropped before it was complete"); }
    };

    template <class>
    using WorkType = detail::StagedWork<typename B::WorkType, Rest>;

    void adopt_plan(B& backend, std::span<const BucketContents> contents) {
        if (!second_) second_.emplace(backend.duplicate());
        Base::adopt(contents);
        buckets_.assign(contents.size(), {});
        std::vector<detail::NumbersOf> rights(detail::parameters_of(contents));
        std::size_t lefts = 0, right_numbers = 0, largest = 0, matrices = 0, gradients = 0;
        for (std::size_t b = 0; b < contents.size(); ++b) {
            Bucket& bucket = buckets_[b] = split(contents[b]);
            bucket.left = lefts;
            bucket.right = right_numbers;
            std::size_t right = right_numbers;
            for (const Matrix& m : bucket.matrices) {
                rights[m.parameter] = {right, m.rank * m.columns};
                right += m.rank * m.columns;
                if (contents[b].dtype != DType::f32) largest = detail::larger(largest, m.rows * m.columns);
            }
            lefts += detail::in_lines_of_floats(bucket.left_count);
            right_numbers += detail::in_lines_of_floats(bucket.right_count);
            matrices += bucket.matrices.size();
            gradients += contents[b].parts.size();
        }
        detail::debug(
            detail::DebugLevel::info, backend.rank(), settings_.describe(), " compresses ", matrices, " of ", gradients,
            " gradients; vectors, gradients without a shape, and matrices that would not shrink travel whole");
        left_ = backend.allocate(lefts * sizeof(float));
        right_.adopt(std::move(rights), backend.allocate(right_numbers * sizeof(float)));
        product_ = kernel::HostBuffer(largest * sizeof(float));
    }

    WorkType<B> start(B& backend, std::size_t b, BufferView bucket, ReduceOp op, Contribution contribution) {
        if (!Base::compresses(backend, b, bucket, contribution, [&] { return !buckets_[b].matrices.empty(); }))
            return WorkType<B>(backend.all_reduce(bucket, op, contribution));
        const Bucket& own = buckets_[b];
        second_->set_timeout(backend.timeout());
        const double unit = Base::hold(b, bucket, contribution, left_of(own), own.left_count * sizeof(float));
        if (unit != 0) make_left(b);
        // The scale of 1 is right: these numbers contain the gradients with their scale already.
        return WorkType<B>(
            backend.all_reduce(BufferView{left_of(own), own.left_count}, ReduceOp::mean, {1, contribution.weight}),
            Rest{this, b, bucket, contribution.weight, unit});
    }

    Traffic traffic(const B&, std::size_t b, BufferView bucket) const noexcept {
        const Bucket& own = buckets_[b];
        if (own.matrices.empty() || Base::was_early(b)) return {bucket.bytes(), 1};
        return {(own.left_count + own.right_count) * sizeof(float), 2};
    }
    std::chrono::nanoseconds progress_time() const noexcept {
        return second_ ? computed_ + std::chrono::nanoseconds(second_->progress_time()) : computed_;
    }
    /// Q, with which the next step starts: up to `rank` vectors of n elements.
    BufferView shared(std::size_t i) const noexcept { return right_.of(i); }

private:
    struct Matrix {
        std::size_t parameter = 0;
        std::size_t offset = 0;  ///< in its bucket
        std::size_t rows = 0, columns = 0;
        std::size_t rank = 0;  ///< 0: the parameter travels whole
    };
    struct Bucket {
        std::vector<Matrix> matrices;
        std::vector<detail::NumbersOf> whole;  ///< the parameters that travel whole
        /// P of all matrices, the parameters that travel whole, and a 1 if there are any. Its mean is 0 if no rank has
        /// a weight; then they have not travelled.
        std::size_t left = 0, left_count = 0;
        std::size_t right = 0, right_count = 0;  ///< Q of all matrices
    };

    Matrix matrix_of(const BucketContents::Part& part) const noexcept {
        if (part.shape.size() < 2 || part.count == 0) return {};
        const std::size_t rows = part.shape.front(), columns = part.count / rows;
        const std::size_t low = detail::smaller(settings_.rank, detail::smaller(rows, columns));
        const double sent = static_cast<double>(low * (rows + columns));
        if (!(sent * settings_.min_compression_rate < static_cast<double>(part.count))) return {};
        return {part.parameter, part.offset, rows, columns, low};
    }

    /// Divides a bucket into matrices and parameters that travel whole. Without matrices, or if compression would not
    /// shrink it, the bucket travels whole, in its own type.
    Bucket split(const BucketContents& contents) const {
        Bucket bucket;
        if (!detail::is_compressible(contents.dtype)) return bucket;
        for (const BucketContents::Part& part : contents.parts) {
            const Matrix matrix = matrix_of(part);
            if (matrix.rank == 0) {
                bucket.whole.push_back({part.offset, part.count});
                bucket.left_count += part.count;
            } else {
                bucket.matrices.push_back(matrix);
                bucket.left_count += matrix.rank * matrix.rows;
                bucket.right_count += matrix.rank * matrix.columns;
            }
        }
        if (!bucket.whole.empty()) ++bucket.left_count;
        const bool pays =
            (bucket.left_count + bucket.right_count) * sizeof(float) < contents.count * size_of(contents.dtype);
        return pays && !bucket.matrices.empty() ? bucket : Bucket();
    }

    float* left_of(const Bucket& bucket) const noexcept { return static_cast<float*>(left_.data()) + bucket.left; }

    /// Calls `f(matrix, its P, its Q)` for each matrix, and returns the end of the last P.
    template <class F>
    float* for_matrices(const Bucket& bucket, F&& f) {
        float* left = left_of(bucket);
        float* right = right_.at(bucket.right);
        for (const Matrix& m : bucket.matrices) {
            f(m, left, right);
            left += m.rank * m.rows;
            right += m.rank * m.columns;
        }
        return left;
    }

    /// Orthonormalises the vectors that a step starts with, so that P has the magnitude of the gradient. Guesses
    /// vectors that are missing or lost.
    void prepare(const Matrix& m, float* right, std::uint64_t step) const {
        const std::size_t n = m.columns;
        if (!kernel::orthonormalise(right, n, m.rank)) std::memset(right, 0, m.rank * n * sizeof(float));
        bool guessed = false;
        for (std::size_t c = 0; c < m.rank; ++c) {
            if (kernel::largest_magnitude(right + c * n, n) != 0) continue;
            std::uint64_t state = c ^ (step << 32);
            state = detail::split_mix(state) ^ settings_.seed ^ (m.parameter * 0x9e3779b97f4a7c15u);
            // Evenly from [-1, 1).
            for (std::size_t j = 0; j < n; ++j)
                right[c * n + j] = static_cast<float>(static_cast<std::int64_t>(detail::split_mix(state))) * 0x1p-63f;
            guessed = true;
        }
        if (guessed) kernel::orthonormalise(right, n, m.rank);
    }

    /// Computes P of this rank's matrices, and copies the parameters that travel whole behind it.
    void make_left(std::size_t b) {
        const Bucket& own = buckets_[b];
        const std::uint64_t step = Base::steps_[b] - 1;
        float* to = for_matrices(own, [&](const Matrix& m, float* left, float* right) {
            prepare(m, right, step);
            kernel::times_right(residuals_.bucket(b) + m.offset, m.rows, m.columns, right, m.rank, left);
        });
        for (const detail::NumbersOf& part : own.whole) {
            std::memcpy(to, residuals_.bucket(b) + part.first, part.count * sizeof(float));
            to += part.count;
        }
        if (!own.whole.empty()) *to = 1;
    }

    /// P is averaged: computes this rank's Q, and keeps the difference as residual.
    void make_right(std::size_t b, double unit) {
        const auto begin = std::chrono::steady_clock::now();
        const Bucket& own = buckets_[b];
        for_matrices(own, [&](const Matrix& m, float* left, float* right) {
            float* const sum = residuals_.bucket(b) + m.offset;
            const bool finite = kernel::orthonormalise(left, m.rows, m.rank);
            if (finite && unit == 0) {
                std::memset(right, 0, m.rank * m.columns * sizeof(float));
            } else if (finite) {
                kernel::left_times(sum, m.rows, m.columns, left, m.rank, right);
                kernel::add_product(sum, m.rows, m.columns, left, right, m.rank, -1);
            } else {  // the same on every rank: the product becomes NaN
                for (std::size_t i = 0; i < m.rank * m.rows; ++i) left[i] = std::numeric_limits<float>::quiet_NaN();
                forget(m, sum, right);
            }
        });
        computed_ += std::chrono::steady_clock::now() - begin;
    }

    /// P and Q are averaged: writes their product to the gradients.
    void expand(std::size_t b, BufferView bucket, double weight, double unit) {
        const auto begin = std::chrono::steady_clock::now();
        const Bucket& own = buckets_[b];
        const float* from = for_matrices(own, [&](const Matrix& m, float* left, float* right) {
            const BufferView gradient = bucket.subview(m.offset, m.rows * m.columns);
            float* const product = static_cast<float*>(bucket.dtype == DType::f32 ? gradient.data : product_.data());
            std::memset(product, 0, gradient.count * sizeof(float));
            kernel::add_product(product, m.rows, m.columns, left, right, m.rank);
            residuals_.hand_out(b, m.offset, ConstBufferView{product, gradient.count}, gradient, weight);
            if (!detail::is_finite(kernel::largest_magnitude(right, m.rank * m.columns)))
                forget(m, residuals_.bucket(b) + m.offset, right);
        });
        const bool travelled = !own.whole.empty() && left_of(own)[own.left_count - 1] != 0;
        for (const detail::NumbersOf& part : own.whole) {
            if (travelled && unit != 0) std::memset(residuals_.bucket(b) + part.first, 0, part.count * sizeof(float));
            residuals_.hand_out(b, part.first, ConstBufferView{from, part.count},
                                bucket.subview(part.first, part.count), weight);
            from += part.count;
        }
        if (unit != 0) residuals_.settle(b, bucket.count, unit);
        computed_ += std::chrono::steady_clock::now() - begin;
    }

    static void forget(const Matrix& m, float* sum, float* right) noexcept {
        std::memset(sum, 0, m.rows * m.columns * sizeof(float));
        std::memset(right, 0, m.rank * m.columns * sizeof(float));
    }

    std::optional<B> second_;  ///< a communicator of its own for the averages of Q, whose order differs from that of P
    std::vector<Bucket> buckets_;
    Memory left_{};
    detail::Remembered<Memory> right_;
    kernel::HostBuffer product_;  ///< product of a matrix of low precision, in f32
};

}  // namespace gradsync::inline v0_2
