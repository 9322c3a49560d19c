// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "support/averaging_oracle.hpp"
#include "training.hpp"

namespace gradsync_test {

/// The results of one rank.
struct Trained {
    std::vector<Bytes> weights;
    std::vector<double> norms;  ///< of all steps in which it asked for one
};

/// All parameters with their weights before the first step.
inline std::vector<Tensor> initial_model(const DrawnTraining& t) {
    std::vector<Tensor> result;
    for (const auto& p : t.parameters) {
        result.emplace_back("p" + std::to_string(result.size()), p.value, std::vector<std::size_t>{p.count});
        result.back().value = random_gradient(result.back(), 77, 0, result.size());
    }
    return result;
}

/// Elements of one type.
struct Vector {
    Bytes bytes;
    gradsync::DType type;

    static Vector zeros(gradsync::DType type, std::size_t count) { return {constant_bytes(type, count, 0), type}; }
    gradsync::BufferView view() { return {bytes.data(), bytes.size() / size_of(type), type, gradsync::MemorySpace::host}; }
    gradsync::ConstBufferView view() const { return {bytes.data(), bytes.size() / size_of(type), type}; }
    Vector as(gradsync::DType to) const {
        Vector result = zeros(to, view().count);
        gradsync::kernel::copy(view(), result.view());
        return result;
    }
    void add(const Vector& other) { bytes = sum_of(type, {bytes, other.as(type).bytes}); }
};

/// Trains alone, as plainly as possible.
template <class O>
class Oracle {
public:
    explicit Oracle(const DrawnTraining& t) : t_(t), model_(initial_model(t)), optimizer_(O{}, model_) {}

    std::string train(const std::vector<double>& norms) {
        for (int s = 0; s < t_.steps; ++s) {
            std::vector<Vector> averages;
            double squares = 0;
            bool poisoned = false;
            for (std::size_t i = 0; i < model_.size(); ++i) {
                poisoned = poisoned || (t_.poisoned(s) && is_stepped(s, i) && model_[i].count() != 0);
                averages.push_back(is_stepped(s, i) ? average(s, i) : Vector::zeros(t_.parameters[i].gradient, model_[i].count()));
                for (const double x : numbers(averages[i].view())) squares += x * x;
            }
            if (poisoned) squares = 0;
            const bool adds_means = t_.pooled() && !t_.counted() && t_.options.averaging != gradsync::Averaging::sum;
            const double divisor = adds_means ? t_.micro_batches : 1;
            double factor = 1;
            if (t_.max_norm > 0) {
                const double norm = norms.at(static_cast<std::size_t>(s)), plain = std::sqrt(squares) / divisor;
                const double rounded = t_.tolerance == 0 ? 0 : t_.tolerance * norm_without_cancellation(s);
                if (!(std::abs(norm - plain) <= std::max({1e-12 * plain, t_.tolerance * plain, rounded})))
                    return "the norm of step " + std::to_string(s) + " is " + std::to_string(norm) + ", not " + std::to_string(plain);
                factor = gradsync::clip_factor(norm, t_.max_norm);
            }
            if (t_.skips(s) || poisoned) continue;
            optimizer_.begin_step();
            for (std::size_t i = 0; i < model_.size(); ++i) {
                if (!is_stepped(s, i)) continue;
                const bool scales = t_.kind == Kind::reducer && t_.in_place;
                if (scales && factor != 1) gradsync::kernel::scale(averages[i].view(), factor);
                optimizer_.step(i, averages[i].view(), (scales ? 1 : factor) / divisor, model_[i].value_view());
            }
        }
        return {};
    }
    const std::vector<Tensor>& model() const { return model_; }

private:
    int rounds() const { return t_.pooled() ? t_.turns(0) : 1; }  ///< calls of finish() per step

    /// Is it trained, and has any rank used it?
    bool is_stepped(int s, std::size_t i) const {
        for (int r = 0; r < t_.ranks; ++r)
            for (int m = 0; m < t_.turns(r); ++m)
                if (t_.has_batch(s, t_.pooled() ? m : 0, r) && t_.uses(s, m, r, i)) return t_.is_trained(s, i);
        return false;
    }
    Vector gradient(int s, int m, int r, std::size_t i) {
        Vector result = Vector::zeros(t_.parameters[i].gradient, model_[i].count());
        if (t_.uses(s, m, r, i)) write_gradient(result.view(), model_[i].value_view(), r, t_.batch(s, m), i);
        return result;
    }

    /// An upper bound of the norm of a step, whatever the signs: sums that are added in another order differ in proportion to it.
    double norm_without_cancellation(int s) {
        double squares = 0;
        for (std::size_t i = 0; i < model_.size(); ++i) {
            std::vector<double> sums(model_[i].count());
            for (int r = 0; r < t_.ranks; ++r)
                for (int m = 0; m < t_.turns(r); ++m) {
                    const std::vector<double> values = numbers(gradient(s, m, r, i).view());
                    for (std::size_t k = 0; k < sums.size(); ++k) sums[k] += std::abs(values[k]);
                }
            for (const double x : sums) squares += x * x;
        }
        return std::sqrt(squares);
    }

    /// The type in which gradient i travels.
    gradsync::DType wire(std::size_t i) const {
        const gradsync::DType own = t_.parameters[i].gradient;
        const bool adds_up = t_.options.accumulation == gradsync::Accumulation::in_buckets || t_.counted();
        return t_.options.reduce_dtype ? *t_.options.reduce_dtype : t_.borrows() && adds_up ? gradsync::accumulator_of(own) : own;
    }

    /// A rank's part of the sum that finish() number `round` makes. `first`: it has the rank's weight.
    gradsync::Contribution contribution(int s, int round, int r, bool first = true) const {
        const bool has_batch = t_.has_batch(s, round, r);
        const double weight = t_.weight(s, round, r);
        switch (t_.options.averaging) {
            case gradsync::Averaging::mean:
                return has_batch ? gradsync::Contribution{1, 1}
                                 : gradsync::Contribution{0, t_.options.divisor == gradsync::JoinDivisor::all_ranks ? 1.0 : 0.0};
            case gradsync::Averaging::sum: return {has_batch ? 1.0 : 0.0, r == 0 && first ? 1.0 : 0.0};
            case gradsync::Averaging::weighted_mean:
                if (t_.ranks == 1 && weight != 0) return {1, 1};  // x w / w is x
                return has_batch ? gradsync::Contribution{weight, weight} : gradsync::Contribution{0, 0};
            default: return has_batch ? gradsync::Contribution{1, first ? weight : 0} : gradsync::Contribution{0, 0};
        }
    }

    /// The gradient that the optimizer steps with.
    Vector average(int s, std::size_t i) {
        Vector result = t_.counted() ? of_counted(s, i) : of_rounds(s, i);
        return t_.kind == Kind::reducer ? result.as(t_.parameters[i].gradient) : result;
    }

    /// All micro-batches of a step are the leaves of one tree.
    Vector of_counted(int s, std::size_t i) {
        std::vector<Bytes> leaves(t_.options.micro_batches);
        std::vector<gradsync::Contribution> by(leaves.size());
        for (int r = 0; r < t_.ranks; ++r)
            for (int m = 0; m < t_.turns(r); ++m) {
                const std::size_t leaf = t_.deal().number(r, static_cast<std::size_t>(m));
                leaves[leaf] = gradient(s, m, r, i).as(wire(i)).bytes;
                by[leaf] = contribution(s, t_.pooled() ? m : 0, r, m == 0);
                if (!t_.uses(s, m, r, i)) by[leaf].scale = 0;
            }
        return {combined(wire(i), leaves, by), wire(i)};
    }

    Vector of_rounds(int s, std::size_t i) {
        Vector sum = Vector::zeros(gradsync::accumulator_of(wire(i)), model_[i].count());
        for (int round = 0; round < rounds(); ++round) {
            std::vector<Bytes> by_rank;
            std::vector<gradsync::Contribution> by;
            for (int r = 0; r < t_.ranks; ++r) {
                by_rank.push_back(sum_of_rank(s, round, r, i).as(wire(i)).bytes);
                by.push_back(contribution(s, round, r));
            }
            const Vector mean{t_.per_group == 0 ? combined(wire(i), by_rank, by) : mean_of_groups(wire(i), by_rank), wire(i)};
            if (!t_.pooled()) return mean;
            sum.add(mean);
        }
        return sum;
    }
    Vector sum_of_rank(int s, int round, int r, std::size_t i) {
        if (t_.pooled()) return gradient(s, round, r, i);
        const bool in_buckets = t_.options.accumulation == gradsync::Accumulation::in_buckets;
        std::optional<Vector> sum;
        for (int m = 0; m < t_.micro_batches; ++m) {
            if (!t_.uses(s, m, r, i)) continue;
            if (!sum)
                sum =
                    in_buckets && t_.micro_batches > 1 ? gradient(s, m, r, i).as(gradsync::accumulator_of(wire(i))) : gradient(s, m, r, i);
            else if (in_buckets) sum->add(gradient(s, m, r, i));
            else write_gradient(sum->view(), model_[i].value_view(), r, t_.batch(s, m), i, true);
        }
        return sum ? *sum : Vector::zeros(t_.parameters[i].gradient, model_[i].count());
    }
    Bytes mean_of_groups(gradsync::DType type, const std::vector<Bytes>& by_rank) const {
        std::vector<Bytes> means;
        for (auto first = by_rank.begin(); first != by_rank.end(); first += t_.per_group)
            means.push_back(mean_of(type, {first, first + t_.per_group}));
        return mean_of(type, means);
    }

    const DrawnTraining& t_;
    std::vector<Tensor> model_;
    WholeOptimizer<O> optimizer_;
};

/// Are these weights the oracle's?
inline bool agree(const DrawnTraining& t, gradsync::ConstBufferView weights, gradsync::ConstBufferView oracles) {
    if (t.tolerance == 0) return bytes_of(weights) == bytes_of(oracles);
    const std::vector<double> all = numbers(weights), expected = numbers(oracles);
    double largest = 1, distance = 0;
    for (std::size_t k = 0; k < all.size(); ++k) {
        largest = std::max(largest, std::abs(expected[k]));
        if (const double d = std::abs(all[k] - expected[k]); !(d <= distance)) distance = d;
    }
    return distance <= t.tolerance * largest;
}

/// Compares the weights of all ranks, which must have the same bits, with the oracle's. Norms are compared with a tolerance, because the
/// order of their sums is not promised; but all ranks must have the same one, with which the oracle clips. Returns the first difference, or
/// "".
template <class O = AdamW>
std::string difference(const DrawnTraining& t, const std::vector<Trained>& ranks) {
    for (const Trained& rank : ranks) {
        if (rank.norms != ranks[0].norms) return "the ranks' norms differ";
        for (std::size_t i = 0; i < t.parameters.size(); ++i)
            if (rank.weights.at(i) != ranks[0].weights.at(i)) return "the ranks' weights of parameter " + std::to_string(i) + " differ";
    }
    Oracle<O> oracle(t);
    if (const std::string wrong_norm = oracle.train(ranks[0].norms); !wrong_norm.empty()) return wrong_norm;
    for (std::size_t i = 0; i < t.parameters.size(); ++i) {
        const Tensor& expected = oracle.model()[i];
        if (!agree(t, {ranks[0].weights[i].data(), expected.count(), expected.dtype},
                   {expected.value.data(), expected.count(), expected.dtype}))
            return "weights of parameter " + std::to_string(i);
    }
    return {};
}

}  // namespace gradsync_test
