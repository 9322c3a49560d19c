// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <span>
#include <string>

namespace gradsync::inline v0_2 {

/// What an optimizer steps at a time: some contiguous elements of one parameter. All arrays are of `value.size()` elements.
template <class T>
struct OptimizerSlice {
    std::size_t parameter = 0;         ///< its index: whose learning rate and weight decay apply
    std::size_t first = 0;             ///< the slice's first element, in the parameter
    std::span<T> value = {};           ///< the master weights, to be updated in place
    std::span<const T> gradient = {};  ///< to be multiplied by `gradient_scale`
    double gradient_scale = 1;
    std::span<T* const> state = {};  ///< `state_count()` arrays; all zero before the first step
};

/// An optimizer that works element by element, and so on any slice of the parameters: SGD, Adam, Lion, ...; not one that looks at
/// a whole tensor (LAMB, Shampoo).
///
/// - `state_count()`: arrays of state that it keeps for each element (SGD with momentum: 1, Adam: 2).
/// - `begin_step()` comes once before the slices of a step, in whatever order they come.
/// - `step(slice)` for `OptimizerSlice<float>`; for `OptimizerSlice<double>` too where parameters are f64.
///
/// Scalars (the number of steps, the learning rate) are the optimizer's own, and yours to save and to load.
template <class O>
concept FlatOptimizer = std::movable<O> && requires(O& optimizer, const O& constant, const OptimizerSlice<float>& slice) {
    { constant.state_count() } -> std::convertible_to<std::size_t>;
    optimizer.begin_step();
    optimizer.step(slice);
};

}  // namespace gradsync::inline v0_2
