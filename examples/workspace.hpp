// SPDX-License-Identifier: BSL-1.0
#pragma once
// Memory that a model computes in.

#include <cstddef>
#include <vector>

#include "parameters.hpp"

namespace gradsync_train {

/// Hands out arrays, and knows how much.
template <class Ops>
class Workspace {
public:
    explicit Workspace(Ops ops) : ops_{ops} {}

    typename Ops::Floats floats(std::size_t n) {
        bytes_ += n * sizeof(float);
        return ops_.floats(n);
    }
    typename Ops::Factors factors(std::size_t n) {
        bytes_ += n * ops_.factor_bytes();
        return ops_.factors(n);
    }
    typename Ops::Factors rounding(std::size_t n) {
        if (ops_.factor_bytes() != sizeof(float)) bytes_ += n * ops_.factor_bytes();
        return ops_.rounding(n);
    }
    std::size_t bytes() const { return bytes_; }

private:
    Ops ops_;
    std::size_t bytes_ = 0;
};

/// The weight matrices as factors. The forward pass rounds each where it uses it; the backward pass uses the same factors.
template <class Ops>
class WeightFactors {
public:
    WeightFactors() = default;
    WeightFactors(Workspace<Ops>& workspace, const Parameters& parameters) {
        for (const Parameter& p : parameters) rooms_.push_back(workspace.rounding(p.decays() ? p.count : 0));
    }

    const typename Ops::Factor* round(const Ops& ops, const Parameters& parameters, std::size_t i) {
        return ops.as_factors(parameters[i].count, parameters.value(i), rooms_[i]);
    }
    /// Returns what the last `round` of i made. The weights must not have changed since.
    const typename Ops::Factor* rounded(const Ops& ops, const Parameters& parameters, std::size_t i) const {
        return ops.rounded(parameters.value(i), rooms_[i]);
    }

private:
    std::vector<typename Ops::Factors> rooms_;  // by parameter
};

}  // namespace gradsync_train
