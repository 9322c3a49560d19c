// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

#include "../core/backend.hpp"
#include "../core/buffer_view.hpp"
#include "../core/error.hpp"
#include "../core/exchange.hpp"

namespace gradsync::inline v0_2 {

/// An exchange that sends less data than the gradients hold, and keeps the rest for the next step. Pass its settings to a Reducer:
///
///     gs::Reducer sync(comm, parameters, gs::PowerSgd{.rank = 2});
///
/// All averages, weights, uneven inputs and accumulation work as with AllReduce, and all ranks get the same bits. Buckets of f64 or
/// integers, and a world of one rank, are not compressed.
///
/// Nothing is lost: in each step, the sum that travels plus the residuals that stay equals the sum of all gradients and all earlier
/// residuals, up to rounding. The exception is a parameter that no rank used in a step (UnusedParameters::find_unused): what travelled for
/// it is dropped. A residual counts in a later mean as much as a gradient of that step, regardless of the weights when it was kept. A rank
/// without weight, or in a sum without a batch, keeps its residual for later, except rank 0, whose residual always counts in a sum.
///
/// Bad settings throw Error(invalid_argument) when the Reducer is made.
///
/// State for checkpoints (see docs/compression.md), in `Reducer::exchange()`, to be read and written between steps:
/// - `residual(i)`: the residual of parameter i on this rank, one f32 per element; empty if nothing is ever kept.
/// - `shared(i)`: further state of parameter i, the same on all ranks, f32; may be empty. The compressor owns the memory of both; it is
///   valid until `rebuild_buckets` returns true.
/// - `steps()`, `set_steps(n)`: the number of steps so far; 0, and without effect, in a world of one rank.
template <class X, class B>
concept Compressor = ExchangePolicy<X, B> && !ExchangeOver<X, B>::traits.scatters &&
                     requires(ExchangeOver<X, B>& compressor, const ExchangeOver<X, B>& constant, std::size_t i, std::uint64_t n) {
                         { constant.residual(i) } -> std::same_as<BufferView>;
                         { constant.shared(i) } -> std::same_as<BufferView>;
                         { constant.steps() } -> std::same_as<std::uint64_t>;
                         { compressor.set_steps(n) } -> std::same_as<void>;
                     };

namespace detail {

/// Compressors work in host memory only.
template <Backend B>
consteval bool compresses_on() {
    static_assert(
        B::memory_space == MemorySpace::host,
        "gradsync: TopK, PowerSgd and Quantizer compress in host memory; on a device send fewer bits (ReducerOptions::reduce_dtype)");
    return true;
}

/// 17 digits: different numbers get different texts.
inline std::string text_of(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.17g", x);
    return text;
}

}  // namespace detail

}  // namespace gradsync::inline v0_2
