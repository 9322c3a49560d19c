// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "error_feedback.hpp"

namespace gradsync::inline v0_2 {

/// An exchange that sends less data than the gradients hold, and keeps the rest for the next step.
/// Pass its settings to a Reducer:
///
///     gs::Reducer sync(comm, parameters, gs::PowerSgd{.rank = 2});
///
/// All averages, weights, uneven inputs and accumulation work as with AllReduce, and all ranks get the same bits.
/// Buckets of f64 or integers, and a world of one rank, are not compressed.
///
/// Nothing is lost: in each step, the sum that travels plus the residuals that stay equals the sum of all gradients and
/// all earlier residuals, up to rounding of f32. If an average does not fit into its type, the compressor keeps the
/// rest for later. There is one exception: the sum of a parameter that no rank used in a step
/// (UnusedParameters::find_unused). A residual counts in a later mean as much as a gradient of that step, regardless of
/// the weights when it was kept. A rank without weight, or in a sum without a batch, keeps its residual for later,
/// except rank 0, whose residual always counts in a sum. With Averaging::mean_over_count a residual that was read from
/// a checkpoint counts as for a weight of 1 in steps of weight 0 before the rank's first other weight.
///
/// Bad settings throw Error(invalid_argument) when the Reducer is made.
///
/// State for checkpoints (see docs/guides/slow-networks.md), in `Reducer::exchange()`,
/// to be read and written between steps:
/// - `residual(i)`: the residual of parameter i on this rank, one f32 per element; empty if nothing is ever kept.
/// - `shared(i)`: further state of parameter i, the same on all ranks, f32; may be empty. The compressor owns the
///   memory of both; it is valid until `rebuild_buckets` returns true.
/// - `steps()`, `set_steps(n)`: the number of steps so far; 0, and without effect, in a world of one rank.
template <class X, class B>
concept Compressor =
    ExchangePolicy<X, B> && !ExchangeOver<X, B>::traits.scatters &&
    requires(ExchangeOver<X, B>& compressor, const ExchangeOver<X, B>& constant, std::size_t i, std::uint64_t n) {
        { constant.residual(i) } -> std::same_as<BufferView>;
        { constant.shared(i) } -> std::same_as<BufferView>;
        { constant.steps() } -> std::same_as<std::uint64_t>;
        { compressor.set_steps(n) } -> std::same_as<void>;
    };

namespace detail {

/// The common part of compressors: settings, residuals, and the number of steps of each bucket. Settings has
/// `start_step` (steps before it are not compressed) and `describe()`.
template <Backend B, class Settings>
class CompressedExchange {
    static_assert(B::memory_space == MemorySpace::host,
                  "gradsync: PowerSgd and Quantizer compress in host memory; on a device send fewer bits "
                  "(ReducerOptions::reduce_dtype)");

public:
    static constexpr ExchangeTraits traits{.adopts_plan = true, .reports_traffic = true, .reports_progress_time = true};

    CompressedExchange& operator=(CompressedExchange&&) = delete;  // works point to it

    bool is_single_rank(const B& backend) const noexcept { return backend.size() == 1; }
    std::chrono::nanoseconds progress_time() const noexcept { return computed_; }
    std::string describe() const { return settings_.describe(); }

    BufferView residual(std::size_t i) const noexcept { return residuals_.parameter(i); }
    BufferView shared(std::size_t) const noexcept { return {}; }
    std::uint64_t steps() const noexcept { return steps_.empty() ? 0 : steps_.front(); }
    void set_steps(std::uint64_t n) noexcept {
        for (std::uint64_t& steps : steps_) steps = n;
    }

protected:
    using Memory = decltype(std::declval<B&>().allocate(std::size_t{}));

    explicit CompressedExchange(const Settings& settings) : settings_(settings) {}
    ~CompressedExchange() = default;

    void adopt(std::span<const BucketContents> contents) {
        residuals_.adopt_plan(contents);
        steps_.assign(contents.size(), steps());
    }

    /// Counts a step of bucket b. Returns false if it travels whole in this step, with `contribution`, which may
    /// change. `shrinks()` returns whether its compressed form is smaller, and is called only if there are other ranks.
    template <class Shrinks>
    bool compresses(const B& backend, std::size_t b, BufferView bucket, Contribution& contribution, Shrinks&& shrinks) {
        if (is_single_rank(backend) || steps_[b]++ < settings_.start_step || !is_compressible(bucket.dtype))
            return false;
        if (shrinks()) return true;
        contribution = residuals_.release(b, bucket, contribution);
        return false;
    }
    /// Adds the gradients of bucket b to its residual, and returns its unit. If that is 0, this rank sends nothing: it
    /// zeroes the `bytes` bytes of `message`.
    double hold(std::size_t b, BufferView bucket, Contribution contribution, void* message, std::size_t bytes) {
        if (const double unit = residuals_.unit_of(contribution); unit != 0) {
            residuals_.begin(b, bucket, contribution.scale, unit);
            return unit;
        }
        residuals_.hold_back(b, bucket, contribution.scale);
        // An infinity must show in this step, not in the one that sends the residual.
        if (!is_finite(kernel::largest_magnitude(residuals_.bucket(b), bucket.count))) return 1;
        std::memset(message, 0, bytes);
        return 0;
    }
    /// Whether the last step of bucket b was too early to be compressed.
    bool was_early(std::size_t b) const noexcept { return steps_[b] <= settings_.start_step; }

    const Settings settings_;
    ErrorFeedback residuals_;
    std::vector<std::uint64_t> steps_;  ///< by bucket
    std::chrono::nanoseconds computed_{};
};

}  // namespace detail

}  // namespace gradsync::inline v0_2
