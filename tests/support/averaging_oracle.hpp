// SPDX-License-Identifier: BSL-1.0
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

/// sum_r scale_r x_r / sum_r weight_r: in the order of the tree over the ranks, in f32 for 16-bit types and in the type itself otherwise,
/// times the rounded reciprocal of the divisor, rounded once to `to`. Ranks whose scale is 0 are left out.
Bytes combined(gradsync::DType dtype, const std::vector<Bytes>& by_rank, const std::vector<gradsync::Contribution>& by);

Bytes mean_of(gradsync::DType dtype, const std::vector<Bytes>& by_rank);
Bytes sum_of(gradsync::DType dtype, const std::vector<Bytes>& by_rank);

/// `random_gradient` of every rank.
std::vector<Bytes> gradients_of_all(const Tensor& t, int ranks, int batch, std::size_t i);

/// What `finish()` leaves in gradient i with Averaging::mean after `backward(..., batch)` on every rank.
Bytes expected_mean(const Tensor& t, int ranks, int batch, std::size_t i);

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
