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

/// An exchange that sends less than the gradients have, and keeps what it did not send for the next step. It is the fourth argument of a
/// Reducer:
///
///     gs::Reducer<B, gs::SizeCappedBuckets, gs::OverlapBackward, gs::PowerSgd<B>> sync(comm, parameters, {}, {}, {},
///                                                                                      gs::PowerSgd<B>({.rank = 2}));
///
/// All averages, weights, uneven inputs and accumulation are as with AllReduce; all ranks get the same bits. In each step what travels,
/// plus what the ranks keep, is the sum of all their gradients and of what they had kept (but for rounding, and for what came of a
/// parameter in a step in which nobody used it, see UnusedParameters::find_unused). What a rank keeps counts in a later mean as much as its
/// gradient of that step does, whatever the weights were when it was kept; where the rank has no weight, and in a sum no batch, it stays
/// where it is. (But rank 0 is the divisor of a sum, always.) Buckets of f64 or integers, and a world of one rank, are not compressed.
///
/// State, for checkpoints (see docs/compression.md), between steps:
/// - `residual(i)`: what this rank keeps of parameter i, f32, as many as its elements (empty if nothing is ever kept). Every rank's own.
/// - `shared(i)`: what else there is of it, the same on all ranks, f32; may be empty. Both are memory of the compressor's, valid until
///   `rebuild_buckets` returns true.
/// - `steps()`, `set_steps(n)`: how many it has seen; 0, and of no effect, in a world of one rank.
template <class X, class B>
concept Compressor =
    ExchangePolicy<X, B> && !X::traits.scatters && requires(X& compressor, const X& constant, std::size_t i, std::uint64_t n) {
        { constant.residual(i) } -> std::same_as<BufferView>;
        { constant.shared(i) } -> std::same_as<BufferView>;
        { constant.steps() } -> std::same_as<std::uint64_t>;
        { compressor.set_steps(n) } -> std::same_as<void>;
    };

namespace detail {

/// What compressors have in common: they work in host memory.
template <Backend B>
consteval bool compresses_on() {
    static_assert(
        B::memory_space == MemorySpace::host,
        "gradsync: TopK, PowerSgd and Quantizer compress in host memory; on a device send fewer bits (ReducerOptions::reduce_dtype)");
    return true;
}

/// So that no two numbers have one text.
inline std::string text_of(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.17g", x);
    return text;
}

}  // namespace detail

}  // namespace gradsync::inline v0_2
