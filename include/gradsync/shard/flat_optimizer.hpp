// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <span>

namespace gradsync::inline v0_2 {

/// The unit of an optimizer step: contiguous elements of one parameter. All arrays have `value.size()` elements. The memory is the
/// library's, and valid during the call.
template <class T>
struct OptimizerSlice {
    std::size_t parameter = 0;         ///< index, to look up its learning rate and weight decay
    std::size_t first = 0;             ///< index of the slice's first element in the parameter
    std::span<T> value = {};           ///< master weights, to be updated in place
    std::span<const T> gradient = {};  ///< multiply it by `gradient_scale`
    double gradient_scale = 1;
    std::span<T* const> state = {};  ///< `state_count()` arrays; all zero before the first step
};

/// An optimizer that works element by element, so that it can step any slice of a parameter: SGD, Adam, Lion. Optimizers that need a whole
/// tensor (LAMB, Shampoo) do not fit.
///
/// - `state_count()`: the number of arrays of state that it keeps, 8 at most (SGD with momentum: 1, Adam: 2).
/// - `begin_step()` is called once before the slices of a step, which come in any order.
/// - `step(slice)` takes an `OptimizerSlice<float>`, and an `OptimizerSlice<double>` too if there are f64 parameters.
/// - `round(slice)`, if there is one, takes a `RoundingSlice` and rounds master weights to the type of the weights, after each step and
///   whenever they were written (`publish()`, `distribute_state()`); in stage 3 at each gather. Without it they are rounded to nearest.
///
/// The optimizer owns its scalars (step count, learning rate); save and load them yourself.
template <class O>
concept FlatOptimizer = std::movable<O> && requires(O& optimizer, const O& constant, const OptimizerSlice<float>& slice) {
    { constant.state_count() } -> std::convertible_to<std::size_t>;
    optimizer.begin_step();
    optimizer.step(slice);
};

}  // namespace gradsync::inline v0_2
