// SPDX-License-Identifier: BSL-1.0
#pragma once
// What a model exposes to its trainer: named parameters, how they begin, and where their weights are.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numbers>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace gradsync_train {

/// SplitMix64: small, fast, and the same numbers on every platform (unlike the distributions of <random>).
class Random {
public:
    explicit Random(std::uint64_t seed) : state_{seed} {}

    std::uint64_t next() { return mix(state_ += increment); }
    /// As if `n` numbers had been drawn; `normal` draws two.
    void skip(std::uint64_t n) { state_ += n * increment; }
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
    static constexpr std::uint64_t increment = 0x9e3779b97f4a7c15u;

    std::uint64_t state_;
};

struct Parameter {
    std::string name;
    std::vector<std::size_t> shape;
    std::size_t count = 0;   // of scalars
    std::uint32_t uses = 1;  // a tied weight receives gradients from two places, and is final at the second

    /// Weight decay is for matrices: biases and norms have no scale to keep small.
    bool decays() const { return shape.size() > 1; }
};

/// A matrix between layers: no table of tokens or positions, and not the output layer. `p` has a name and a shape.
bool is_inner_matrix(const auto& p) {
    return p.shape.size() == 2 && p.name != "embedding.weight" && p.name != "positions.weight" && p.name != "output.weight";
}

/// Owns no weights: whoever trains the model decides where they are, and when, and binds them here.
class Parameters {
public:
    explicit Parameters(std::uint64_t seed) : random_{seed} {}

    /// Registers a parameter drawn from a normal distribution; returns its index.
    std::size_t add(std::string name, std::vector<std::size_t> shape, double deviation, std::uint32_t uses = 1) {
        const std::size_t index = add_constant(std::move(name), std::move(shape), 0.0f);
        initial_[index] = {0.0f, deviation, random_};
        random_.skip(2 * all_[index].count);
        all_[index].uses = uses;
        return index;
    }

    std::size_t add_constant(std::string name, std::vector<std::size_t> shape, float value) {
        std::size_t count = 1;
        for (std::size_t extent : shape) count *= extent;
        all_.push_back({std::move(name), std::move(shape), count});
        initial_.push_back({value, 0.0, random_});
        values_.push_back(nullptr);
        return all_.size() - 1;
    }

    /// Writes the first weights of parameter i, from element `first` on: any part of them can be had without the rest.
    void initialise(std::size_t i, std::size_t first, std::span<float> out) const {
        if (source_) return source_(i, first, out);
        const Initial& initial = initial_[i];
        if (initial.deviation == 0) {
            std::fill(out.begin(), out.end(), initial.constant);
            return;
        }
        Random random = initial.random;
        random.skip(2 * first);
        for (float& x : out) x = static_cast<float>(initial.deviation * random.normal());
    }

    /// First weights come from elsewhere from now on: `source` does what `initialise` does, for several threads at once.
    void initialise_from(std::function<void(std::size_t i, std::size_t first, std::span<float> out)> source) {
        source_ = std::move(source);
    }

    /// The weights of parameter i are at `value` from now on; null: they are nowhere, and must not be used.
    void bind(std::size_t i, const float* value) { values_[i] = value; }
    const float* value(std::size_t i) const { return values_[i]; }

    std::size_t size() const { return all_.size(); }
    const Parameter& operator[](std::size_t i) const { return all_[i]; }
    auto begin() const { return all_.begin(); }
    auto end() const { return all_.end(); }

    /// Arrays for these parameters, by whoever trains the model, that outlive it. Null: there is no such place.
    void keep_arrays_in(std::shared_ptr<void>& arrays) { arrays_ = &arrays; }
    std::shared_ptr<void>* kept_arrays() const { return arrays_; }

    /// The number of scalars in all parameters together.
    std::size_t count() const {
        std::size_t sum = 0;
        for (const auto& p : all_) sum += p.count;
        return sum;
    }

private:
    struct Initial {
        float constant;
        double deviation;  // 0: constant
        Random random;     // at the first element
    };

    std::vector<Parameter> all_;
    std::vector<Initial> initial_;
    std::function<void(std::size_t, std::size_t, std::span<float>)> source_;
    std::vector<const float*> values_;
    std::shared_ptr<void>* arrays_ = nullptr;
    Random random_;
};

}  // namespace gradsync_train
