// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>

#include "../core/dtype.hpp"
#include "../core/error.hpp"
#include "../core/list.hpp"
#include "../core/reduce_op.hpp"
#include "../core/sum_tree.hpp"

namespace gradsync::inline v0_2::kernel {

/// One fused pass: combines the inputs, the leaves of a tree (core/sum_tree.hpp), and writes the result to every output. Ranks that share an
/// address space, or a window of it, reduce with it.
///
/// `inputs[i]` and `outputs[j]` point to `count` elements of `dtype` each. An output is one of the inputs, or overlaps none of them. Input
/// i is multiplied by `scales[i]` first (empty: by 1), and the result by `factor` last; both are for floating types. The reduction computes
/// in the accumulator's type (`accumulator_of`) and rounds once. The bits of an element depend only on the inputs, the factors and the tree.
struct Reduction {
    ListView<const void* const> inputs;
    ListView<const double> scales;
    ListView<void* const> outputs;
    std::size_t count = 0;
    DType dtype = DType::f32;
    ReduceOp op = ReduceOp::sum;
    double factor = 1;
    /// If inputs are nodes of a larger tree: how often the last two open sums are added after input i. One sum is left at the end.
    ListView<const std::uint8_t> sums = {};
};

/// The loops over elements of one floating type, compiled for every instruction set. Everything else that is done with 16- and 8-bit types
/// goes block by block through f32. The loops of f32 and of integers are called directly.
///
/// A program compiles the tables of the types that it names: where a C++ type becomes a DType, `register_kernels` (tables.hpp) stores its
/// table for `kernels_of`.
struct Kernels {
    void (*to_f32)(const void* from, float* to, std::size_t n) = nullptr;
    void (*from_f32)(const float* from, void* to, std::size_t n) = nullptr;
    bool (*all_finite)(const void* elements, std::size_t n) = nullptr;
    void (*sum)(const Reduction* r) = nullptr;  ///< the hot path: sums and means of unscaled inputs; null: 8-bit types
    // f64 only:
    void (*to_f32_odd)(const void* from, float* to, std::size_t n) = nullptr;  ///< to be rounded again, see `round_to_odd`
    void (*reduce)(const Reduction* r) = nullptr;
    void (*scale)(double* data, std::size_t n, double factor) = nullptr;
    void (*clamp)(double* data, std::size_t n, double limit) = nullptr;
    void (*add)(void* to, DType to_type, const void* from, DType from_type, std::size_t n) = nullptr;
    void (*add_squares)(const double* data, std::size_t n, double* sums) = nullptr;
};

namespace detail {

/// By dtype. All shared objects of a program have the same ones, even with -fvisibility=hidden.
[[gnu::visibility("default")]] inline std::atomic<const Kernels*> tables[dtype_count];

[[noreturn, gnu::cold, gnu::noinline]] inline void no_kernels(DType type) {
    using gradsync::detail::text;
    gradsync::detail::raise(Errc::invalid_argument, text("no code for elements of ", type,
                                                         " is in this program: give their type where a view of them is made, as in "
                                                         "gs::BufferView{pointer, count, gs::DType::",
                                                         type, "}, not afterwards in its member dtype"));
}

}  // namespace detail

/// The table of a floating type other than f32. Throws Error(invalid_argument) if nothing has registered it.
inline const Kernels& kernels_of(DType type) {
    const Kernels* const table = detail::tables[static_cast<std::size_t>(type)].load(std::memory_order_relaxed);
    if (table == nullptr) detail::no_kernels(type);
    return *table;
}

/// Throws as `kernels_of` does if elements of any type cannot be reduced.
inline void require_kernels(DType type) {
    if (is_floating(type) && type != DType::f32) kernels_of(type);
}

}  // namespace gradsync::inline v0_2::kernel
