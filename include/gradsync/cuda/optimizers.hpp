// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cmath>

#include "../core/flat_optimizer.hpp"
#include "passes.hpp"

/// Optimizers that step in device memory, with f32 state, f32 master weights, and gradients of any floating type except
/// f64. A step launches one kernel per 44 tensors. They need the library's kernels: link gradsync::cuda. `step` does
/// not wait, and throws Error(invalid_argument) for other types. Not thread-safe.

namespace gradsync::inline v0_2::cuda {

/// The settings of a group of parameters.
struct AdamWOptions {
    /// As in PyTorch: the weight decay is decoupled from the gradient.
    double learning_rate = 1e-3, beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0.01;
};
/// The settings of a group of parameters.
struct SgdOptions {
    /// As in PyTorch: the weight decay is added to the gradient.
    double learning_rate = 1e-2, momentum = 0.9, weight_decay = 0;
    bool nesterov = false;  ///< momentum as Nesterov defines it
};

/// Internal: the common part of these optimizers. Parameter groups with their settings, and the number of steps, which
/// a checkpoint must save.
template <class Options>
class GroupedOptimizer {
public:
    /// One group.
    explicit GroupedOptimizer(Options options = {}) : groups_{options} {}
    /// `group_of`: by parameter, the index of its group.
    GroupedOptimizer(List<Options> groups, List<std::size_t> group_of)
        : groups_(std::move(groups)), group_of_(std::move(group_of)) {
        for (const std::size_t g : group_of_)
            if (g >= groups_.size())
                detail::raise(Errc::invalid_argument, {.operation = "optimizer"}, "a parameter is of group ", g,
                              ", and there are ", groups_.size());
    }

    static constexpr bool takes_f64 = false;                             ///< see DeviceOptimizer
    std::size_t group_count() const noexcept { return groups_.size(); }  ///< Returns the number of groups.
    /// May be changed between steps.
    Options& options(std::size_t group = 0) noexcept { return groups_[group]; }
    const Options& options(std::size_t group = 0) const noexcept { return groups_[group]; }
    std::uint64_t steps() const noexcept { return steps_; }           ///< Returns the steps taken so far.
    void set_steps(std::uint64_t steps) noexcept { steps_ = steps; }  ///< Sets them, after a checkpoint was loaded.
    void begin_step() noexcept { ++steps_; }
    /// Later steps also multiply gradients by `*factor`, which is in device memory, so that no host
    /// waits for it. Null: no factor.
    void scale_gradients_by(const float* factor) noexcept { factor_ = factor; }

protected:
    const Options& options_of(std::size_t parameter) const noexcept {
        return groups_[parameter < group_of_.size() ? group_of_[parameter] : 0];
    }

    List<Options> groups_;
    List<std::size_t> group_of_;
    std::uint64_t steps_ = 0;
    const float* factor_ = nullptr;
};

/// AdamW (Loshchilov and Hutter, arXiv 1711.05101), with corrected means:
/// w = (1 - rate * decay) w - rate / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + epsilon).
class AdamW : public GroupedOptimizer<AdamWOptions> {
public:
    using GroupedOptimizer::GroupedOptimizer;

    static constexpr std::size_t state_count() noexcept { return 2; }
    void step(std::span<const DeviceSlice> slices, double gradient_scale, cudaStream_t stream) {
        rules_.clear();
        for (const DeviceSlice& slice : slices) rules_.push_back(rule(slice.parameter, gradient_scale));
        adamw(slices, rules_, factor_, stream);
    }
    /// The coefficients of step number `steps()` for a parameter.
    AdamWRule rule(std::size_t parameter, double gradient_scale) const {
        const AdamWOptions& o = options_of(parameter);
        const auto t = static_cast<double>(steps_);
        return {.gradient_scale = static_cast<float>(gradient_scale),
                .beta1 = static_cast<float>(o.beta1),
                .beta2 = static_cast<float>(o.beta2),
                .step_size = static_cast<float>(o.learning_rate / (1 - std::pow(o.beta1, t))),
                .second_correction = static_cast<float>(1 / (1 - std::pow(o.beta2, t))),
                .epsilon = static_cast<float>(o.epsilon),
                .shrink = static_cast<float>(1 - o.learning_rate * o.weight_decay)};
    }

private:
    List<AdamWRule> rules_;  ///< by slice; kept, so that a step allocates nothing
};

/// Stochastic gradient descent with momentum, as PyTorch defines it:
/// g += decay * w; m = momentum * m + g; w -= rate * m (Nesterov: rate * (g + momentum * m)).
class Sgd : public GroupedOptimizer<SgdOptions> {
public:
    using GroupedOptimizer::GroupedOptimizer;

    static constexpr std::size_t state_count() noexcept { return 1; }
    void step(std::span<const DeviceSlice> slices, double gradient_scale, cudaStream_t stream) {
        rules_.clear();
        for (const DeviceSlice& slice : slices) rules_.push_back(rule(slice.parameter, gradient_scale));
        sgd(slices, rules_, factor_, stream);
    }
    /// Internal.
    SgdRule rule(std::size_t parameter, double gradient_scale) const {
        const SgdOptions& o = options_of(parameter);
        return {.gradient_scale = static_cast<float>(gradient_scale),
                .rate = static_cast<float>(o.learning_rate),
                .momentum = static_cast<float>(o.momentum),
                .decay = static_cast<float>(o.weight_decay),
                .nesterov = o.nesterov};
    }

private:
    List<SgdRule> rules_;
};

}  // namespace gradsync::inline v0_2::cuda
