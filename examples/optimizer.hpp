#pragma once
// AdamW, and the learning rate over time.

#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

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

template <class Ops>
class AdamW {
public:
    AdamW(const Parameters<Ops>& parameters, double weight_decay) : weight_decay_{weight_decay} {
        for (const auto& p : parameters) {
            first_.emplace_back(p.value.size(), 0.0f);
            second_.emplace_back(p.value.size(), 0.0f);
        }
    }

    /// `gradient_scale` multiplies every gradient on the fly: clipping costs no pass of its own.
    void step(Parameters<Ops>& parameters, const std::vector<float*>& gradients, double learning_rate,
              double gradient_scale) {
        ++steps_;
        const auto t = static_cast<double>(steps_);
        AdamWFactors factors{
            .gradient_scale = static_cast<float>(gradient_scale),
            .beta1 = static_cast<float>(beta1),
            .beta2 = static_cast<float>(beta2),
            .step_size = static_cast<float>(learning_rate / (1.0 - std::pow(beta1, t))),
            .second_correction = static_cast<float>(1.0 / (1.0 - std::pow(beta2, t))),
            .epsilon = 1e-8f,
            .shrink = 1.0f,
        };
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            auto& p = parameters[i];
            factors.shrink = static_cast<float>(p.decays() ? 1.0 - learning_rate * weight_decay_ : 1.0);
            Ops::adamw(p.value.size(), factors, gradients[i], p.value.data(), first_[i].data(), second_[i].data());
        }
    }

    // The state, for a checkpoint.
    std::uint64_t steps() const { return steps_; }
    void set_steps(std::uint64_t steps) { steps_ = steps; }
    std::vector<typename Ops::Floats>& first() { return first_; }
    std::vector<typename Ops::Floats>& second() { return second_; }

    static constexpr double beta1 = 0.9, beta2 = 0.99;

private:
    double weight_decay_;
    std::uint64_t steps_ = 0;
    std::vector<typename Ops::Floats> first_, second_;  // running means of the gradient and of its square
};

}  // namespace gradsync_train
