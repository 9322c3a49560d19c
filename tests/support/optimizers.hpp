// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <gradsync/core/flat_optimizer.hpp>

namespace gradsync_test {

/// AdamW with a learning rate for each parameter: matrices decay, others do not, as the group says.
struct AdamW {
    std::vector<double> rates = {};  ///< by parameter; the last one repeats
    int steps = 0;

    static constexpr std::size_t state_count() { return 2; }
    void begin_step() { ++steps; }
    template <class T>
    void step(const gradsync::OptimizerSlice<T>& s) const {
        const T rate = static_cast<T>(rates.empty() ? 0.01 : rates[s.parameter < rates.size() ? s.parameter : rates.size() - 1]);
        const T decay = s.parameter % 2 == 0 ? T(0.1) : T(0), scale = static_cast<T>(s.gradient_scale);
        const T first = T(1) - std::pow(T(0.9), T(steps)), second = T(1) - std::pow(T(0.99), T(steps));
        for (std::size_t k = 0; k < s.value.size(); ++k) {
            const T g = s.gradient[k] * scale;
            T &m = s.state[0][k], &v = s.state[1][k];
            m = T(0.9) * m + T(0.1) * g;
            v = T(0.99) * v + T(0.01) * g * g;
            s.value[k] -= rate * (m / first / (std::sqrt(v / second) + T(1e-3)) + decay * s.value[k]);
        }
    }
};

/// AdamW that refuses slices which do not lie where elements of their type may.
struct AlignedAdamW : AdamW {
    template <class T>
    void step(const gradsync::OptimizerSlice<T>& s) const {
        for (const T* array : {static_cast<const T*>(s.value.data()), s.gradient.data(), static_cast<const T*>(s.state[0]),
                               static_cast<const T*>(s.state[1])})
            if (reinterpret_cast<std::uintptr_t>(array) % alignof(T) != 0)
                throw std::logic_error("parameter " + std::to_string(s.parameter));
        AdamW::step(s);
    }
};

/// Stochastic gradient descent with momentum, for f32 only.
struct Sgd {
    float rate = 0.1f;

    static constexpr std::size_t state_count() { return 1; }
    void begin_step() {}
    void step(const gradsync::OptimizerSlice<float>& s) const {
        for (std::size_t k = 0; k < s.value.size(); ++k) {
            s.state[0][k] = 0.9f * s.state[0][k] + s.gradient[k] * static_cast<float>(s.gradient_scale);
            s.value[k] -= rate * s.state[0][k];
        }
    }
};

}  // namespace gradsync_test
