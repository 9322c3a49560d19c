// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gradsync/observe/timeline.hpp>

#include "strategies.hpp"
#include "synchroniser.hpp"

namespace bench {

/// What one rank saw of its steps under one strategy.
struct Observed {
    double exposed_seconds = 0;        ///< of a step, the median
    double communication_seconds = 0;  ///< the same
    double state_bytes = 0;            ///< of weights, gradients and the optimizer
    double second_loss = 0;            ///< of the second step: it follows from what was made of the first gradients
};

/// One rank of a training, which takes turns in several strategies. Each has weights, gradients and an optimizer of its
/// own; all compute in the same memory, so that none is slower for where that lies.
class Trainee {
public:
    virtual ~Trainee() = default;
    /// Takes up one more strategy, and does its first steps. `timeline`, if any, is what `make` has observe it; the
    /// steps add the trainer's scopes. `meet`, if any, is called after each backward. Collective, as is `make`.
    virtual void learn(const trainer::Options& options, const trainer::MakeSynchroniser& make,
                       std::unique_ptr<gradsync::Timeline> timeline = {}, std::function<void()> meet = {}) = 0;
    /// Steps of the strategy that was taken up as number `which`, from 0. Collective.
    virtual void train(std::size_t which, int steps) = 0;
    /// Does what the last steps have left to be done. Collective.
    virtual void end() = 0;
    virtual Observed observed(std::size_t which) const = 0;
    /// What keeps the ranks together under that strategy.
    virtual const trainer::Synchroniser& synchroniser(std::size_t which) const = 0;
};

/// Of the model that `options` name; strategies differ in nothing that makes another model of it.
std::unique_ptr<Trainee> make_trainee(const trainer::Options& options, int rank);

/// `model`: see `models()`.
inline std::unique_ptr<Trainee> make_trainee(const std::string& model, int rank) { return make_trainee(options_for(model, {}), rank); }

/// Throws unless the strategies that synchronise have had the same loss after their first step: sums are the same bits
/// whatever travels together, and when.
void check_equal_losses(const std::vector<std::string>& names, const std::vector<Observed>& observed);

}  // namespace bench
