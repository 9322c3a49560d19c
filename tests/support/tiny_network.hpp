// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <gradsync/core/parameter.hpp>

#include "tensor.hpp"

namespace gradsync_test {

/// One sample: four inputs and a target.
struct Sample {
    float input[4];
    float target;
};

inline std::vector<Sample> samples(std::size_t count, std::uint64_t seed = 5) {
    Random random(seed);
    const auto uniform = [&] { return static_cast<float>(static_cast<double>(random() >> 40) / 0x1p23 - 1); };
    std::vector<Sample> result(count);
    for (Sample& s : result) {
        for (float& x : s.input) x = uniform();
        s.target = s.input[0] * s.input[1] - s.input[2] + 0.1f * uniform();
    }
    return result;
}

/// A two-layer perceptron whose backward is written by hand, with Adam: enough to compare a data-parallel training
/// with a local one.
class TinyNetwork {
public:
    static constexpr std::size_t inputs = 4, hidden = 6;

    explicit TinyNetwork(std::uint64_t seed = 1) {
        const std::size_t counts[] = {inputs * hidden, hidden, hidden, 1};
        Random random(seed);
        for (const std::size_t n : counts) {
            values_.emplace_back(n);
            for (float& x : values_.back()) x = static_cast<float>(static_cast<double>(random() >> 40) / 0x1p24 - 0.5);
            gradients_.emplace_back(n, 0.0f);
            first_.emplace_back(n, 0.0f);
            second_.emplace_back(n, 0.0f);
        }
    }

    std::vector<gradsync::ParameterView> parameters() {
        const char* names[] = {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"};
        std::vector<gradsync::ParameterView> views;
        for (std::size_t i = 0; i < values_.size(); ++i) views.push_back(gradsync::parameter(names[i], values_[i], gradients_[i]));
        return views;
    }

    std::size_t size() const { return values_.size(); }
    std::vector<float>& gradient(std::size_t i) { return gradients_[i]; }
    const std::vector<std::vector<float>>& values() const { return values_; }

    /// The gradient of the mean squared error over the batch (or of its sum), times `scale`, goes to
    /// `into(i)`: added to it, or in place of it. `ready(i)` follows for each parameter, in reverse.
    template <class Into, class Ready>
    void backward(std::span<const Sample> batch, bool mean, bool add, Into&& into, Ready&& ready) const {
        std::vector<std::vector<double>> sums;
        for (const auto& v : values_) sums.emplace_back(v.size(), 0.0);
        for (const Sample& s : batch) {
            double h[hidden], output = values_[3][0];
            for (std::size_t j = 0; j < hidden; ++j) {
                double z = values_[1][j];
                for (std::size_t k = 0; k < inputs; ++k) z += static_cast<double>(values_[0][j * inputs + k]) * s.input[k];
                h[j] = std::tanh(z);
                output += values_[2][j] * h[j];
            }
            const double error = 2 * (output - s.target);
            sums[3][0] += error;
            for (std::size_t j = 0; j < hidden; ++j) {
                sums[2][j] += error * h[j];
                const double dz = error * values_[2][j] * (1 - h[j] * h[j]);
                sums[1][j] += dz;
                for (std::size_t k = 0; k < inputs; ++k) sums[0][j * inputs + k] += dz * s.input[k];
            }
        }
        const double factor = mean && !batch.empty() ? 1.0 / static_cast<double>(batch.size()) : 1.0;
        for (std::size_t i = values_.size(); i-- > 0;) {
            const std::span<float> gradient = into(i);
            for (std::size_t k = 0; k < gradient.size(); ++k)
                gradient[k] = (add ? gradient[k] : 0.0f) + static_cast<float>(factor * sums[i][k]);
            ready(i);
        }
    }

    /// The same, into the network's own gradients.
    template <class Ready>
    void backward(std::span<const Sample> batch, Ready&& ready) {
        backward(
            batch, true, false, [&](std::size_t i) { return std::span<float>(gradients_[i]); }, ready);
    }

    /// One step of Adam with the gradients at `gradient(i)`.
    template <class Gradient>
    void adam(Gradient&& gradient, float rate = 0.05f) {
        ++steps_;
        const auto t = static_cast<float>(steps_);
        for (std::size_t i = 0; i < values_.size(); ++i) {
            const std::span<const float> g = gradient(i);
            for (std::size_t k = 0; k < g.size(); ++k) {
                first_[i][k] = 0.9f * first_[i][k] + 0.1f * g[k];
                second_[i][k] = 0.999f * second_[i][k] + 0.001f * g[k] * g[k];
                const float m = first_[i][k] / (1 - std::pow(0.9f, t)), v = second_[i][k] / (1 - std::pow(0.999f, t));
                values_[i][k] -= rate * m / (std::sqrt(v) + 1e-4f);
            }
        }
    }
    void adam() {
        adam([&](std::size_t i) { return std::span<const float>(gradients_[i]); });
    }

    /// Of the squared error over the batch.
    double loss(std::span<const Sample> batch) const {
        double sum = 0;
        for (const Sample& s : batch) {
            double output = values_[3][0];
            for (std::size_t j = 0; j < hidden; ++j) {
                double z = values_[1][j];
                for (std::size_t k = 0; k < inputs; ++k) z += static_cast<double>(values_[0][j * inputs + k]) * s.input[k];
                output += values_[2][j] * std::tanh(z);
            }
            sum += (output - s.target) * (output - s.target);
        }
        return sum / static_cast<double>(batch.size());
    }

private:
    std::vector<std::vector<float>> values_, gradients_, first_, second_;
    int steps_ = 0;
};

/// Within the tolerance that PyTorch's own tests use.
inline bool close(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b, double relative = 1.3e-6,
                  double absolute = 5e-5) {
    for (std::size_t i = 0; i < a.size(); ++i)
        for (std::size_t k = 0; k < a[i].size(); ++k) {
            const double x = a[i][k], y = b[i][k];
            if (!(std::abs(x - y) <= absolute + relative * std::abs(y))) return false;
        }
    return a.size() == b.size();
}

}  // namespace gradsync_test
