#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include <gradsync/core/reduce_op.hpp>

#include "tensor.hpp"

/// Data-parallel averaging, said as plainly as possible.

namespace gradsync_test {

/// sum_r scale_r x_r / sum_r weight_r: in rank order, in f32 for 16-bit types and in the type itself otherwise,
/// times the rounded reciprocal of the divisor, rounded once to `to`. Ranks whose scale is 0 are left out.
inline Bytes combined(gradsync::DType dtype, const std::vector<Bytes>& by_rank, const std::vector<gradsync::Contribution>& by) {
    return with_type(dtype, [&]<class T>(T*) {
        using A = std::conditional_t<gradsync::is_low_precision(gradsync::dtype_of<T>), float, T>;
        std::vector<T> result(by_rank.front().size() / sizeof(T), element_of<T>(0));
        double weight = 0;
        for (const gradsync::Contribution& c : by) weight += c.weight;
        for (std::size_t k = 0; k < result.size(); ++k) {
            A sum{};
            bool first = true;
            for (std::size_t r = 0; r < by_rank.size(); ++r) {
                if (by[r].scale == 0) continue;
                T x;
                std::memcpy(&x, by_rank[r].data() + k * sizeof(T), sizeof(T));
                const A term = static_cast<A>(static_cast<A>(x) * static_cast<A>(by[r].scale));
                sum = first ? term : static_cast<A>(sum + term);
                first = false;
            }
            if (weight == 0) sum = A{};
            else if (weight != 1) sum = static_cast<A>(sum * static_cast<A>(1 / weight));
            result[k] = static_cast<T>(sum);
        }
        return bytes_of(gradsync::const_buffer(result));
    });
}

inline Bytes mean_of(gradsync::DType dtype, const std::vector<Bytes>& by_rank) {
    return combined(dtype, by_rank, std::vector<gradsync::Contribution>(by_rank.size()));
}
inline Bytes sum_of(gradsync::DType dtype, const std::vector<Bytes>& by_rank) {
    std::vector<gradsync::Contribution> by(by_rank.size(), {1, 0});
    by.front().weight = 1;
    return combined(dtype, by_rank, by);
}

/// `random_gradient` of every rank.
inline std::vector<Bytes> gradients_of_all(const Tensor& t, int ranks, int batch, std::size_t i) {
    std::vector<Bytes> result;
    for (int r = 0; r < ranks; ++r) result.push_back(random_gradient(t, r, batch, i));
    return result;
}

/// What `finish()` leaves in gradient i with Averaging::mean after `backward(..., batch)` on every rank.
inline Bytes expected_mean(const Tensor& t, int ranks, int batch, std::size_t i) {
    return mean_of(t.dtype, gradients_of_all(t, ranks, batch, i));
}

/// A backward pass: writes the random gradients of micro-batch `batch` one after the other, in an order of this
/// rank's own, marking each as soon as it is written, all its uses at once.
template <class Reducer>
void backward(Reducer& sync, const std::vector<Tensor>& model, int rank, int batch) {
    for (const std::size_t i : shuffled(model.size(), static_cast<std::uint32_t>(rank * 1000 + batch))) {
        if (!model[i].requires_grad) continue;
        write(sync.gradient_view(i), random_gradient(model[i], rank, batch, i));
        for (std::uint32_t use = 0; use < model[i].uses; ++use) sync.mark_ready(i);
    }
}

/// The first parameter whose gradient is not the mean over all ranks of micro-batch `batch`, or "".
template <class Reducer>
std::string wrong_mean(Reducer& sync, const std::vector<Tensor>& model, int ranks, int batch) {
    for (std::size_t i = 0; i < model.size(); ++i)
        if (model[i].requires_grad && !holds(sync.gradient_view(i), expected_mean(model[i], ranks, batch, i)))
            return "the gradient of " + model[i].name + " is not the mean of micro-batch " + std::to_string(batch);
    return {};
}

}  // namespace gradsync_test
