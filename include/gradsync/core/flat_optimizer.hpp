// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>

#include "buffer_view.hpp"

namespace gradsync::inline v0_2 {

/// The unit of an optimizer step: contiguous elements of one parameter. All arrays have `value.size()` elements. The
/// memory is the library's, and valid during the call.
template <class T>
struct OptimizerSlice {
    std::size_t parameter = 0;         ///< index, to look up its learning rate and weight decay
    std::size_t first = 0;             ///< index of the slice's first element in the parameter
    std::span<T> value = {};           ///< master weights, to be updated in place
    std::span<const T> gradient = {};  ///< multiply it by `gradient_scale`
    double gradient_scale = 1;         ///< factor for the gradient
    std::span<T* const> state = {};    ///< `state_count()` arrays; all zero before the first step
};

/// An optimizer that works element by element, so that it can step any slice of a parameter: SGD, Adam, Lion.
/// One that needs whole matrices (Muon, Shampoo) is a MatrixOptimizer.
///
/// - `state_count()`: the number of arrays of state that it keeps, 8 at most (SGD with momentum: 1, Adam: 2).
/// - `begin_step()` is called once before the slices of a step, which come in any order.
/// - `step(slice)` takes an `OptimizerSlice<float>`, and an `OptimizerSlice<double>` too if there are f64 parameters.
/// - `round(slice)`, if there is one, takes a `RoundingSlice` and rounds master weights to the type of the weights,
///   after each step and after each write to them (`publish()`, `distribute_state()`); in stage 3 at each gather.
///   Without it they are rounded to nearest.
///
/// The optimizer owns its scalars (step count, learning rate); save and load them yourself. If `round` uses them, call
/// `publish()` then.
template <class O>
concept FlatOptimizer =
    std::movable<O> && requires(O& optimizer, const O& constant, const OptimizerSlice<float>& slice) {
        { constant.state_count() } -> std::convertible_to<std::size_t>;
        optimizer.begin_step();
        optimizer.step(slice);
    };

/// A whole parameter, as a MatrixOptimizer steps it. The memory is the library's, and valid during the call.
template <class T>
struct OptimizerMatrix {
    std::size_t parameter = 0;                ///< index, to look up its learning rate and weight decay
    std::span<const std::size_t> shape = {};  ///< as registered, outermost first; elements are in row-major order
    std::span<T> value = {};                  ///< master weights, to be updated in place
    std::span<const T> gradient = {};         ///< multiply it by `gradient_scale`
    double gradient_scale = 1;                ///< factor for the gradient
    std::span<T* const> state = {};  ///< `state_count()` arrays of `value.size()` elements; zero before the first step
    std::span<T> scratch = {};       ///< `scratch_count(shape)` elements with any contents
};

/// A FlatOptimizer that also steps whole parameters: Muon, Shampoo. Sharding then gives each of these one owner; see
/// WholeParameters, which says which they are. The others are stepped in slices.
///
/// - `step(matrix)` takes an `OptimizerMatrix<float>`, and an `OptimizerMatrix<double>` too if there are whole
///   parameters in f64.
/// - `scratch_count(shape)` is the number of elements that the step of a parameter of this shape needs as scratch
///   memory. This memory is allocated once, for the largest need.
template <class O>
concept MatrixOptimizer =
    FlatOptimizer<O> && requires(O& optimizer, const O& constant, const OptimizerMatrix<float>& matrix,
                                 std::span<const std::size_t> shape) {
        optimizer.step(matrix);
        { constant.scratch_count(shape) } -> std::convertible_to<std::size_t>;
    };

/// The unit of an optimizer step in device memory: contiguous elements of one parameter. All arrays have `master.count`
/// elements. The memory is the library's; work that the step puts on its stream may use it.
struct DeviceSlice {
    std::size_t parameter = 0;          ///< index, to look up its learning rate and weight decay
    std::size_t first = 0;              ///< index of the slice's first element in the parameter
    BufferView master = {};             ///< master weights in f32 (f64 for f64), to be updated in place
    ConstBufferView gradient = {};      ///< any floating type; multiply it by the step's `gradient_scale`
    std::span<void* const> state = {};  ///< `state_count()` arrays of the masters' type; all zero before the first step
};

/// A FlatOptimizer for a backend of device memory, whose streams are of type Stream.
/// `step(slices, gradient_scale, stream)` puts the step of a bucket's slices, one for each of its parameters,
/// on the stream, and does not wait. The library then rounds master weights to the type of the weights, to nearest.
/// An optimizer with `static constexpr bool takes_f64 = false` is given no weights or gradients in f64:
/// sharded objects refuse them at construction. `gs::cuda::AdamW` is one.
template <class O, class Stream>
concept DeviceOptimizer =
    std::movable<O> &&
    requires(O& optimizer, const O& constant, std::span<const DeviceSlice> slices, double scale, Stream stream) {
        { constant.state_count() } -> std::convertible_to<std::size_t>;
        optimizer.begin_step();
        optimizer.step(slices, scale, stream);
    };

}  // namespace gradsync::inline v0_2
