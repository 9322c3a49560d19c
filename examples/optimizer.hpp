// SPDX-License-Identifier: BSL-1.0
#pragma once
// AdamW, and the learning rate over time.

#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

#include <gradsync/core/flat_optimizer.hpp>

#include "ops.hpp"
#include "parameters.hpp"

namespace gradsync_train {

/// Rises linearly for `warmup` steps, then follows half a cosine down to a tenth of the peak at `steps`.
struct Schedule {
    double peak;
    std::uint64_t warmup;
    std::uint64_t steps;

    double at(std::uint64_t step) const {
        if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
        if (steps <= warmup) return peak;
        const double progress = static_cast<double>(step - warmup) / static_cast<double>(steps - warmup);
        return peak * (0.1 + 0.45 * (1.0 + std::cos(std::numbers::pi * progress)));
    }
};

constexpr double adam_beta1 = 0.9, adam_beta2 = 0.99, adam_epsilon = 1e-8;

/// AdamW as the flags set it. This one steps any part of any parameter in the host's memory: a `gradsync::FlatOptimizer`. On devices it is
/// the library's (cuda/adamw.hpp).
template <class Ops>
class AdamW {
public:
    AdamW(const Parameters& parameters, double weight_decay) : weight_decay_{weight_decay} {
        for (const auto& p : parameters) decays_.push_back(p.decays());
    }

    /// Running means of the gradient and of its square.
    std::size_t state_count() const { return 2; }

    /// Sets the learning rate of the next steps.
    void set_learning_rate(double rate) { rate_ = rate; }

    void begin_step() {
        ++steps_;
        const auto t = static_cast<double>(steps_);
        factors_ = {
            .gradient_scale = 1.0f,
            .beta1 = static_cast<float>(adam_beta1),
            .beta2 = static_cast<float>(adam_beta2),
            .step_size = static_cast<float>(rate_ / (1.0 - std::pow(adam_beta1, t))),
            .second_correction = static_cast<float>(1.0 / (1.0 - std::pow(adam_beta2, t))),
            .epsilon = static_cast<float>(adam_epsilon),
            .shrink = 1.0f,
        };
    }

    /// The slice's scale multiplies gradients on the fly: clipping costs no pass of its own.
    void step(const gradsync::OptimizerSlice<float>& s) const {
        AdamWFactors factors = factors_;
        factors.gradient_scale = static_cast<float>(s.gradient_scale);
        factors.shrink = shrink_of(s.parameter);
        Ops::adamw(s.value.size(), factors, s.gradient.data(), s.value.data(), s.state[0], s.state[1]);
    }

    /// All of its own state that a checkpoint needs.
    std::uint64_t steps() const { return steps_; }
    void set_steps(std::uint64_t steps) { steps_ = steps; }

protected:
    double rate() const { return rate_; }
    float shrink_of(std::size_t i) const { return decays_[i] ? static_cast<float>(1.0 - rate_ * weight_decay_) : 1.0f; }

private:
    double weight_decay_;
    std::vector<bool> decays_;  // by parameter
    double rate_ = 0;
    std::uint64_t steps_ = 0;
    AdamWFactors factors_{};
};

}  // namespace gradsync_train
