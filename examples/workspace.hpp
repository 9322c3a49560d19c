// SPDX-License-Identifier: BSL-1.0
#pragma once
// Memory that a model computes in.

#include <algorithm>
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
    typename Ops::Factors rounding(std::size_t n) { return rounding(n, bytes_); }
    /// For weights, which are counted apart.
    typename Ops::Factors rounding_weights(std::size_t n) { return rounding(n, weight_bytes_); }
    std::size_t bytes() const { return bytes_; }
    std::size_t weight_bytes() const { return weight_bytes_; }
    const Ops& ops() const { return ops_; }

private:
    typename Ops::Factors rounding(std::size_t n, std::size_t& bytes) {
        if (ops_.factor_bytes() != sizeof(float)) bytes += n * ops_.factor_bytes();
        return ops_.rounding(n);
    }

    Ops ops_;
    std::size_t bytes_ = 0, weight_bytes_ = 0;
};

/// The weight matrices as factors. If weights stay in memory, the forward pass rounds each of them, and the backward pass uses the same
/// factors. Otherwise each pass rounds them anew, into one room.
template <class Ops>
class WeightFactors {
public:
    WeightFactors() = default;
    explicit WeightFactors(const Parameters& parameters) : rooms_(parameters.size()), has_room_(parameters.size()) {}

    void set_stay(bool stay) { stay_ = stay; }

    /// The factors are there until the next call, or with weights that stay until the next one for parameter i.
    const typename Ops::Factor* round(Workspace<Ops>& workspace, const Parameters& parameters, std::size_t i) {
        const std::size_t room = stay_ ? i : 0;
        if (!has_room_[room]) {
            std::size_t largest = 0;
            for (const Parameter& p : parameters) largest = std::max(largest, p.decays() ? p.count : 0);
            rooms_[room] = workspace.rounding_weights(stay_ ? parameters[i].count : largest);
            has_room_[room] = true;
        }
        return workspace.ops().as_factors(parameters[i].count, parameters.value(i), rooms_[room]);
    }
    /// Returns what the last `round` of i made, from weights that have not changed since.
    const typename Ops::Factor* rounded(Workspace<Ops>& workspace, const Parameters& parameters, std::size_t i) {
        return stay_ ? workspace.ops().rounded(parameters.value(i), rooms_[i]) : round(workspace, parameters, i);
    }

private:
    bool stay_ = true;
    std::vector<typename Ops::Factors> rooms_;  // by parameter
    std::vector<bool> has_room_;
};

}  // namespace gradsync_train
