// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <limits>

#include "../core/exchange.hpp"
#include "../kernel/elementwise.hpp"
#include "../kernel/host_buffer.hpp"
#include "../kernel/largest.hpp"

namespace gradsync::inline v0_2::detail {

/// `count` f32, rounded up to whole cache lines.
constexpr std::size_t in_lines_of_floats(std::size_t count) noexcept {
    return round_up(count, line_bytes / sizeof(float));
}

/// One more than the highest parameter index of a plan.
inline std::size_t parameters_of(std::span<const BucketContents> contents) noexcept {
    std::size_t count = 0;
    for (const BucketContents& bucket : contents)
        for (const BucketContents::Part& part : bucket.parts) count = larger(count, part.parameter + 1);
    return count;
}

/// f64 and integers travel whole, and have no residual.
constexpr bool is_compressible(DType dtype) noexcept { return is_floating(dtype) && dtype != DType::f64; }

/// The largest number of a compressible type.
constexpr float largest_finite(DType dtype) noexcept {
    switch (dtype) {
        case DType::f16: return 65504;
        case DType::f8e4m3: return 448;
        case DType::f8e5m2: return 57344;
        case DType::bf16: return 0x1.fep127f;
        default: return std::numeric_limits<float>::max();
    }
}

/// The range of a parameter's numbers in a memory of f32.
struct NumbersOf {
    std::size_t first = 0;
    std::size_t count = 0;
};

/// The f32 numbers that a compressor keeps per parameter, in host memory. They follow the
/// parameters when the plan changes.
template <class Memory>
class Remembered {
public:
    /// Moves to `memory`, which is zeroed, with parameter i at places[i]. Numbers of parameters with
    /// an unchanged count are kept.
    void adopt(std::vector<NumbersOf> places, Memory memory) {
        Remembered next;
        next.memory_ = std::move(memory);
        next.places_ = std::move(places);
        for (std::size_t i = 0; i < places_.size(); ++i)
            if (const BufferView from = of(i), to = next.of(i); from.count != 0 && from.count == to.count)
                std::memcpy(to.data, from.data, from.bytes());
        *this = std::move(next);
    }

    float* at(std::size_t first) const noexcept { return static_cast<float*>(memory_.data()) + first; }
    BufferView of(std::size_t parameter) const noexcept {
        if (parameter >= places_.size() || places_[parameter].count == 0) return {};
        return {at(places_[parameter].first), places_[parameter].count};
    }

private:
    Memory memory_{};
    std::vector<NumbersOf> places_;  ///< by parameter
};

/// Error feedback: a rank keeps the part of its gradients that did not travel, the residual, and adds it to the
/// gradients of the next step before they are compressed (Seide et al., 1-bit SGD, 2014; Karimireddy et al., arXiv
/// 1901.09847). Residuals are f32, in the layout of the buckets. Between steps they are in units of the mean for a
/// weight of 1.
class ErrorFeedback {
public:
    void adopt_plan(std::span<const BucketContents> contents) {
        std::vector<NumbersOf> places(parameters_of(contents));
        first_.clear();
        std::size_t numbers = 0;
        for (const BucketContents& bucket : contents) {
            first_.push_back(numbers);
            if (!is_compressible(bucket.dtype)) continue;
            for (const BucketContents::Part& part : bucket.parts)
                places[part.parameter] = {numbers + part.offset, part.count};
            numbers += in_lines_of_floats(bucket.count);
        }
        residuals_.adopt(std::move(places), kernel::HostBuffer(numbers * sizeof(float)));
    }

    /// The residual of bucket b.
    float* bucket(std::size_t b) const noexcept { return residuals_.at(first_[b]); }
    BufferView parameter(std::size_t i) const noexcept { return residuals_.of(i); }

    /// The factor of this rank's residual in a step's sum. It is the rank's weight, so that a residual has the same
    /// share in a later mean, regardless of the weights then. If only other ranks ever have weights, as in a sum, it is
    /// the rank's scale. 0: the rank sends nothing and keeps its residual.
    double unit_of(Contribution own) noexcept {
        if (own.weight != 0) return last_weight_ = own.weight;
        return last_weight_ != 0 ? 0 : own.scale;
    }

    /// Starts a step: residual = unit residual + scale gradient, for all of bucket b. The gradients are not read if
    /// `scale` is 0. `unit` must not be 0. `settle` ends the step.
    void begin(std::size_t b, ConstBufferView gradients, double scale, double unit) const {
        const BufferView residual = {bucket(b), gradients.count};
        if (unit != 1) kernel::scale(residual, unit);
        add(residual, gradients, scale);
    }
    /// The rank sends nothing of bucket b. A gradient without weight is added to the residual,
    /// with the last weight that was not 0.
    void hold_back(std::size_t b, ConstBufferView gradients, double scale) const {
        if (last_weight_ != 0) add({bucket(b), gradients.count}, gradients, scale / last_weight_);
    }
    /// Writes averages of f32 to `to`, which starts at element `first` of bucket b. If `to` has a type of low
    /// precision, this rank adds its share of the rounding errors, which is its weight, to its residual.
    void hand_out(std::size_t b, std::size_t first, ConstBufferView averages, BufferView to, double weight) const {
        if (to.dtype == DType::f32) return kernel::copy(averages, to);
        float* const residual = bucket(b) + first;
        narrow(static_cast<const float*>(averages.data), to,
               [&](std::size_t k, float rest) { residual[k] += static_cast<float>(weight) * rest; });
    }
    /// Ends the step: turns what is left back into a residual.
    void settle(std::size_t b, std::size_t count, double unit) const {
        if (unit != 1) kernel::scale(BufferView{bucket(b), count}, 1 / unit);
    }

    /// For a compressible bucket b that travels whole: adds its residual, which came from another plan or a checkpoint,
    /// to the gradients. Returns the contribution to send.
    Contribution release(std::size_t b, BufferView gradients, Contribution own) {
        const BufferView residual = {bucket(b), gradients.count};
        const double unit = unit_of(own);
        if (unit == 0 || kernel::largest_magnitude(bucket(b), gradients.count) == 0) return own;
        const double factor = own.scale == 0 ? 1 : unit / own.scale;
        if (factor != 1) kernel::scale(residual, factor);
        if (own.scale == 0) own.scale = unit;
        else kernel::add(residual, gradients);
        float* const kept = bucket(b);
        narrow(kept, gradients, [&](std::size_t k, float rest) { kept[k] = rest; });
        if (factor != 1) kernel::scale(residual, 1 / factor);
        return own;
    }

private:
    /// Writes numbers to `to`, with its largest number for what is beyond it, and calls `late(k, rest)` with what it
    /// cannot hold of each.
    template <class Late>
    static void narrow(const float* numbers, BufferView to, Late&& late) {
        const float most = largest_finite(to.dtype);
        kernel::detail::for_blocks(to.count, [&](std::size_t first, std::size_t n) {
            alignas(64) float held[kernel::detail::elementwise_block];
            for (std::size_t k = 0; k < n; ++k) {
                const float x = numbers[first + k];
                held[k] = !is_finite(x) ? x : x > most ? most : x < -most ? -most : x;
            }
            kernel::copy(ConstBufferView{held, n}, to.subview(first, n));
            kernel::copy(to.subview(first, n), BufferView{held, n});
            for (std::size_t k = 0; k < n; ++k)
                late(first + k, is_finite(numbers[first + k]) ? numbers[first + k] - held[k] : 0.0f);
        });
    }
    static void add(BufferView residual, ConstBufferView gradients, double scale) {
        if (scale == 0) return;
        if (scale == 1) return kernel::add(residual, gradients);
        kernel::detail::for_blocks(gradients.count, [&](std::size_t first, std::size_t n) {
            alignas(64) float block[kernel::detail::elementwise_block];
            const BufferView scaled = {block, n};
            kernel::copy(gradients.subview(first, n), scaled);
            kernel::scale(scaled, scale);
            kernel::add(residual.subview(first, n), scaled);
        });
    }

    Remembered<kernel::HostBuffer> residuals_;
    std::vector<std::size_t> first_;  ///< by bucket: index of its first number
    double last_weight_ = 0;          ///< the last weight that was not 0
};

}  // namespace gradsync::inline v0_2::detail
