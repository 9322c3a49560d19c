// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gradsync/bucket/units.hpp>
#include <gradsync/core/flat_optimizer.hpp>
#include <gradsync/gradsync.hpp>

#include "optimizers.hpp"
#include "ranks.hpp"
#include "tensor.hpp"

/// Trainings whose gradients depend on the weights, the rank and the step; and the oracle: every rank holds everything, a plain
/// Reducer averages, and the optimizer steps whole parameters.

namespace gradsync_test {

/// Sizes that leave some shards empty, some parameters smaller than the world and some cut several times.
inline const std::vector<std::size_t> awkward_sizes = {700, 1, 3000, 0, 5, 1025, 2, 64};
inline const gradsync::Units awkward_units({0, 0, 1, 2, 2, 3, 3, 3});

inline std::vector<Tensor> initial_tensors(const std::vector<std::size_t>& counts, gradsync::DType dtype) {
    auto result = tensors(counts, dtype);
    for (std::size_t i = 0; i < result.size(); ++i) result[i].value = random_gradient(result[i], 77, 0, i);
    return result;
}

inline std::vector<gradsync::ParameterView> views_of(std::vector<Tensor>& model) {
    std::vector<gradsync::ParameterView> views;
    for (Tensor& p : model) views.push_back(gradsync::parameter_view(p));
    return views;
}

/// Writes the gradient of parameter i that `rank` computes from micro-batch number `batch` with the weights `value`: a multiple of
/// 1/64 plus a tenth of the weight. Adds it, or overwrites.
void write_gradient(gradsync::BufferView gradient, gradsync::ConstBufferView value, int rank, int batch, std::size_t i, bool add = false);

/// Of all parameters, gathered where they are sharded.
template <class Sharded>
std::vector<Bytes> weights(Sharded& sharded) {
    std::vector<Bytes> result;
    for (std::size_t i = 0; i < sharded.parameters().size(); ++i) {
        if constexpr (requires { sharded.gather(sharded.unit_of(i)); }) {
            const auto use = sharded.gather(sharded.unit_of(i));
            result.push_back(bytes_of(sharded.parameter_value(i)));
        } else {
            result.push_back(bytes_of(sharded.parameter_value(i)));
        }
    }
    return result;
}

/// An optimizer that holds the state of whole parameters, in the type of their master weights: what a shard's is compared with.
template <class O>
class WholeOptimizer {
public:
    WholeOptimizer(O optimizer, std::span<Tensor> parameters) : optimizer_(std::move(optimizer)) {
        for (const Tensor& p : parameters) {
            arrays_.emplace_back();
            const gradsync::DType master = gradsync::accumulator_of(p.dtype);
            for (std::size_t a = 0; a < 1 + optimizer_.state_count(); ++a) arrays_.back().push_back(constant_bytes(master, p.count(), 0));
            gradsync::kernel::copy(gradsync::ConstBufferView{p.value.data(), p.count(), p.dtype}, view(arrays_.back()[0], master));
        }
    }

    /// Steps parameter i with `gradient`, and its `value` follows.
    void step(std::size_t i, gradsync::ConstBufferView gradient, double scale, gradsync::BufferView value) {
        const gradsync::DType master = gradsync::accumulator_of(value.dtype);
        with_type(master, [&]<class T>(T*) {
            if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
                std::vector<T> converted(gradient.count);
                gradsync::kernel::copy(gradient, gradsync::buffer(converted));
                std::vector<T*> state;
                for (std::size_t a = 1; a < arrays_[i].size(); ++a) state.push_back(reinterpret_cast<T*>(arrays_[i][a].data()));
                if constexpr (requires(const gradsync::OptimizerSlice<T>& s) { optimizer_.step(s); })
                    optimizer_.step(gradsync::OptimizerSlice<T>{.parameter = i,
                                                                .value = {reinterpret_cast<T*>(arrays_[i][0].data()), gradient.count},
                                                                .gradient = converted,
                                                                .gradient_scale = scale,
                                                                .state = state});
            }
        });
        gradsync::kernel::copy(view(arrays_[i][0], master), value);
    }
    void begin_step() { optimizer_.begin_step(); }

private:
    static gradsync::BufferView view(Bytes& bytes, gradsync::DType dtype) {
        return {bytes.data(), bytes.size() / size_of(dtype), dtype, gradsync::MemorySpace::host};
    }

    O optimizer_;
    std::vector<std::vector<Bytes>> arrays_;  ///< by parameter: master weights, then the optimizer's
};

/// What a training is.
struct Training {
    std::vector<std::size_t> counts = awkward_sizes;
    gradsync::DType dtype = gradsync::DType::f32;
    int steps = 4;
    int micro_batches = 1;
    double max_norm = 1.5;  ///< clipping; 0 for none
    gradsync::ReducerOptions reducer = {};

    /// The gradients of micro-batch m in step s.
    int batch(int s, int m) const { return s * micro_batches + m; }
};

/// The weights after the oracle's training on `size` ranks; the norms of all steps go to `norms`. Compiled in sharding.cpp, for AdamW and Sgd.
template <class O = AdamW>
std::vector<Bytes> weights_of_whole(int size, const Training& t, O optimizer = {}, std::vector<double>* norms = nullptr);

/// Marks all gradients; weights and gradients lie where elements of their type may.
template <class Sharded>
void mark_aligned(Sharded& sharded, std::size_t parameters, Finding& finding) {
    for (std::size_t i = parameters; i-- > 0;) {
        finding.check(is_aligned(sharded.parameter_value(i)), "weight " + std::to_string(i));
        finding.check(is_aligned(sharded.acquire_gradient(i)), "gradient " + std::to_string(i));
        sharded.mark_ready(i);
    }
}

/// The first parameter whose weights differ, or "".
inline std::string first_difference(const std::vector<Bytes>& expected, const std::vector<Bytes>& actual) {
    if (expected.size() != actual.size()) return "the number of parameters";
    for (std::size_t i = 0; i < expected.size(); ++i)
        if (expected[i] != actual[i]) return "parameter " + std::to_string(i);
    return {};
}

}  // namespace gradsync_test
