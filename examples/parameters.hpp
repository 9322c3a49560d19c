#pragma once
// What a model exposes to its trainer: named parameters; and where their gradients are to be written.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

namespace gradsync_train {

/// SplitMix64: small, fast, and the same numbers on every platform (unlike the distributions of <random>).
class Random {
public:
    explicit Random(std::uint64_t seed) : state_{seed} {}

    std::uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15u); }
    double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
    double normal() {
        const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
        return radius * std::cos(2.0 * std::numbers::pi * uniform());
    }

    static std::uint64_t mix(std::uint64_t z) {
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }

private:
    std::uint64_t state_;
};

template <class Ops>
struct Parameter {
    std::string name;
    std::vector<std::size_t> shape;
    std::uint32_t uses = 1;  // a tied weight receives gradients from two places, and is final at the second
    typename Ops::Floats value;

    /// Weight decay is for matrices: biases and norms have no scale to keep small.
    bool decays() const { return shape.size() > 1; }
};

template <class Ops>
class Parameters {
public:
    explicit Parameters(std::uint64_t seed) : random_{seed} {}

    /// Registers a parameter drawn from a normal distribution; returns its index.
    std::size_t add(std::string name, std::vector<std::size_t> shape, double deviation, std::uint32_t uses = 1) {
        const std::size_t index = add_constant(std::move(name), std::move(shape), 0.0f);
        for (float& x : all_[index].value) x = static_cast<float>(deviation * random_.normal());
        all_[index].uses = uses;
        return index;
    }

    std::size_t add_constant(std::string name, std::vector<std::size_t> shape, float value) {
        std::size_t count = 1;
        for (std::size_t extent : shape) count *= extent;
        all_.push_back({std::move(name), std::move(shape), 1, typename Ops::Floats(count, value)});
        return all_.size() - 1;
    }

    std::size_t size() const { return all_.size(); }
    Parameter<Ops>& operator[](std::size_t i) { return all_[i]; }
    const Parameter<Ops>& operator[](std::size_t i) const { return all_[i]; }
    const float* value(std::size_t i) const { return all_[i].value.data(); }
    auto begin() { return all_.begin(); }
    auto end() { return all_.end(); }
    auto begin() const { return all_.begin(); }
    auto end() const { return all_.end(); }

    /// The number of scalars in all parameters together.
    std::size_t count() const {
        std::size_t sum = 0;
        for (const auto& p : all_) sum += p.value.size();
        return sum;
    }

private:
    std::vector<Parameter<Ops>> all_;
    Random random_;
};

/// Where a backward pass writes its gradients, and whom it tells that one is final.
///
/// Each micro-batch's gradient is computed on its own and then added, so that N micro-batches on one rank give the same
/// bits as one micro-batch on each of N ranks: the order of the sum is the same. The first micro-batch writes straight
/// into the gradients; later ones go through a scratch.
template <class Ops>
class GradientWriter {
public:
    using Ready = std::function<void(std::size_t)>;

    GradientWriter(const Parameters<Ops>& parameters, std::vector<float*> gradients, bool accumulates)
        : gradients_{std::move(gradients)}, targets_(gradients_) {
        std::size_t largest = 0;
        for (const auto& p : parameters) {
            sizes_.push_back(p.value.size());
            uses_.push_back(p.uses);
            // Matrices are written one at a time, and share a scratch that stays in the cache. Vectors are written in
            // pairs, and a tied matrix must survive the others between its uses.
            const bool shares = p.shape.size() > 1 && p.uses == 1;
            if (shares) largest = std::max(largest, p.value.size());
            own_scratch_.emplace_back(accumulates && !shares ? p.value.size() : 0);
        }
        if (accumulates) shared_scratch_.resize(largest);
        seen_.resize(uses_.size());
    }

    /// Starts a micro-batch's backward pass. `ready` is empty for all but the last micro-batch of a step.
    void begin(bool first, Ready ready) {
        first_ = first;
        ready_ = std::move(ready);
        for (std::size_t i = 0; i < targets_.size(); ++i) {
            targets_[i] = first                     ? gradients_[i]
                          : own_scratch_[i].empty() ? shared_scratch_.data()
                                                    : own_scratch_[i].data();
            seen_[i] = 0;
        }
    }

    /// Where the gradient of parameter i is to be written; valid until `done(i)`.
    float* target(std::size_t i) { return targets_[i]; }

    /// One use's contribution to gradient i has been written.
    void done(std::size_t i) {
        if (++seen_[i] == uses_[i] && !first_) Ops::add(sizes_[i], targets_[i], gradients_[i]);
        if (ready_) ready_(i);
    }

private:
    std::vector<float*> gradients_;
    std::vector<float*> targets_;
    std::vector<std::size_t> sizes_;
    std::vector<std::uint32_t> uses_;
    std::vector<std::uint32_t> seen_;
    std::vector<typename Ops::Floats> own_scratch_;
    typename Ops::Floats shared_scratch_;
    bool first_ = true;
    Ready ready_;
};

}  // namespace gradsync_train
