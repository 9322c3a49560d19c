// SPDX-License-Identifier: BSL-1.0
#pragma once
// Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon): the step of a matrix is its momentum, made orthogonal.

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <ctime>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <gradsync/shard/whole_parameters.hpp>

#include "optimizer.hpp"
#include "options.hpp"

namespace gradsync_train {

constexpr double muon_momentum = 0.95;
constexpr int newton_schulz_steps = 5;

/// The optimizer of --optimizer, on the CPU. Without `muon` it is AdamW. With it, matrices take the steps of Muon, and the others (vectors,
/// and the tables of tokens and positions) those of AdamW. A step is as large as those of AdamW usually are (Liu et al., arXiv 2502.16982:
/// 0.2 sqrt(max(M, N)) times the orthogonal matrix), so that one learning rate does for both.
template <class Ops>
class Muon : public AdamW<Ops> {
public:
    Muon(const Parameters& parameters, double weight_decay, bool muon) : AdamW<Ops>{parameters, weight_decay} {
        for (const auto& p : parameters) is_matrix_.push_back(muon && is_inner_matrix(p));
    }

    bool is_matrix(std::size_t i) const { return is_matrix_[i]; }

    using AdamW<Ops>::step;
    /// Two products of the momentum's size, and two of its smaller side squared.
    std::size_t scratch_count(std::span<const std::size_t> shape) const {
        const std::size_t small = std::min(shape[0], shape[1]);
        return 2 * shape[0] * shape[1] + 2 * small * small;
    }
    void step(const gradsync::OptimizerMatrix<float>& m) {
        const double begin = thread_seconds();
        const std::size_t n = m.value.size();
        const auto scale = static_cast<float>(m.gradient_scale), beta = static_cast<float>(muon_momentum);
        float* const momentum = m.state[0];
        float* const x = m.scratch.data();  // Nesterov's: the gradient and the momentum that it has changed
        double squares = 0;
        for (std::size_t k = 0; k < n; ++k) {
            const float g = m.gradient[k] * scale;
            momentum[k] = beta * momentum[k] + g;
            x[k] = g + beta * momentum[k];
            squares += static_cast<double>(x[k]) * static_cast<double>(x[k]);
        }
        const auto to_unit = static_cast<float>(1 / (std::sqrt(squares) + 1e-7));
        for (std::size_t k = 0; k < n; ++k) x[k] *= to_unit;
        const float* const orthogonal = orthogonalise(m.shape[0], m.shape[1], x);

        const auto larger = static_cast<double>(std::max(m.shape[0], m.shape[1]));
        const auto rate = static_cast<float>(this->rate() * 0.2 * std::sqrt(larger));
        const float shrink = this->shrink_of(m.parameter);
        for (std::size_t k = 0; k < n; ++k) m.value[k] = shrink * m.value[k] - rate * orthogonal[k];
        seconds_ += thread_seconds() - begin;
    }

    /// Processor time of all steps of matrices.
    double matrix_seconds() const { return seconds_; }

private:
    /// Makes the singular values of x, of norm 1, nearly 1: five times X <- a X + (b A + c A^2) X with A = X X^T. For a high matrix
    /// A = X^T X, multiplied from the right. x is followed by room for another one and two A. Returns the result, which is in one of both.
    static const float* orthogonalise(std::size_t rows, std::size_t columns, float* x) {
        constexpr float a = 3.4445f, b = -4.7750f, c = 2.0315f;
        const bool wide = rows <= columns;
        const std::size_t n = rows * columns, small = wide ? rows : columns, large = wide ? columns : rows;
        float *y = x + n, *gram = y + n, *polynomial = gram + small * small;
        for (int step = 0; step < newton_schulz_steps; ++step) {
            Ops::gram(small, large, x, wide, gram);
            Ops::product(small, small, small, gram, gram, polynomial);
            for (std::size_t k = 0; k < small * small; ++k) polynomial[k] = b * gram[k] + c * polynomial[k];
            if (wide) Ops::product(rows, columns, rows, polynomial, x, y);
            else Ops::product(rows, columns, columns, x, polynomial, y);
            for (std::size_t k = 0; k < n; ++k) y[k] += a * x[k];
            std::swap(x, y);
        }
        return x;
    }

    static double thread_seconds() {
        std::timespec now{};
        ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
        return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
    }

    std::vector<bool> is_matrix_;  // by parameter
    double seconds_ = 0;
};

/// The optimizer where gradients are averaged before they are stepped.
template <class Ops>
using OptimizerOf = std::conditional_t<Ops::on_device, AdamW<Ops>, Muon<Ops>>;

template <class Optimizer>
Optimizer make_optimizer(const Parameters& parameters, const Options& o) {
    if constexpr (std::constructible_from<Optimizer, const Parameters&, double, bool>)
        return {parameters, o.weight_decay, o.optimizer == "muon"};
    else return {parameters, o.weight_decay};
}

/// Which parameters the library is not to cut, and what their steps cost.
inline gradsync::WholeParameters whole_parameters(const Options& o) {
    return gradsync::WholeParameters([muon = o.optimizer == "muon"](const gradsync::ParameterView& p) {
        return muon && is_inner_matrix(p) ? gradsync::newton_schulz_cost(p) : 0;
    });
}

/// Processor time of the steps of matrices; 0 for optimizers that have none.
double matrix_seconds_of(const auto& optimizer) {
    if constexpr (requires { optimizer.matrix_seconds(); }) return optimizer.matrix_seconds();
    else return 0;
}

}  // namespace gradsync_train
