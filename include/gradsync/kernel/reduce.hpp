// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "../core/dtype.hpp"
#include "../core/reduce_op.hpp"
#include "float8.hpp"
#include "isa.hpp"
#include "pack.hpp"

namespace gradsync::inline v0_2::kernel {

/// One fused pass: combines the inputs in order, and writes the result to every output. Ranks that share an address space, or a window of
/// it, reduce with it.
///
/// `inputs[i]` and `outputs[j]` point to `count` elements of `dtype` each. An output is one of the inputs, or overlaps none of them. Input
/// i is multiplied by `scales[i]` first (empty: by 1), and the result by `factor` last; both are for floating types. The reduction computes
/// in the accumulator's type (`accumulator_of`) and rounds once. The bits of an element depend only on the inputs, the factors and their
/// order.
struct Reduction {
    std::span<const void* const> inputs;
    std::span<const double> scales;
    std::span<void* const> outputs;
    std::size_t count = 0;
    DType dtype = DType::f32;
    ReduceOp op = ReduceOp::sum;
    double factor = 1;
};

namespace detail {

// Operations on accumulators; integers wrap around.

struct Sum {
    template <class A>
    GRADSYNC_ALWAYS_INLINE static A apply(A a, A x) {
        if constexpr (std::is_integral_v<A>) return static_cast<A>(std::uint64_t(a) + std::uint64_t(x));
        else return a + x;
    }
};
struct Product {
    template <class A>
    GRADSYNC_ALWAYS_INLINE static A apply(A a, A x) {
        if constexpr (std::is_integral_v<A>) return static_cast<A>(std::uint64_t(a) * std::uint64_t(x));
        else return a * x;
    }
};
template <bool largest>
struct Extreme {  // a NaN wins
    template <class A>
    GRADSYNC_ALWAYS_INLINE static A apply(A a, A x) {
        A result = (largest ? x > a : x < a) || x != x ? x : a;
        keep_nan(a, result);
        keep_nan(x, result);
        return result;
    }
};

/// Any operation on any number of inputs, block by block through accumulators that stay in the first-level cache. All loops have the length
/// of a whole block, a constant, so that they are vectorised at -O2; the last block is padded.
template <class T>
struct BlockedReduce {
    using A = accumulator_t<T>;
    static constexpr std::size_t block = 256;

    GRADSYNC_ALWAYS_INLINE static void run(const Reduction* r) {
        alignas(64) A result[block];
        alignas(64) A next[block];
        alignas(64) T elements[block] = {};
        for (std::size_t first = 0; first < r->count; first += block) {
            const std::size_t n = r->count - first < block ? r->count - first : block;
            for (std::size_t i = 0; i < r->inputs.size(); ++i) {
                A* const into = i == 0 ? result : next;
                const T* from = static_cast<const T*>(r->inputs[i]) + first;
                if (n < block) from = static_cast<const T*>(std::memcpy(elements, from, n * sizeof(T)));
                convert_block(from, into, block);
                if (!r->scales.empty()) multiply(into, r->scales[i]);
                if (i != 0) combine(r->op, result, next);
            }
            multiply(result, r->factor);
            convert_block(result, elements, block);  // rounded once, then copied to all outputs from the cache
            for (void* output : r->outputs) std::memcpy(static_cast<T*>(output) + first, elements, n * sizeof(T));
        }
    }

private:
    GRADSYNC_ALWAYS_INLINE static void combine(ReduceOp op, A* result, const A* next) {
        switch (op) {
            case ReduceOp::sum:
            case ReduceOp::mean: return apply<Sum>(result, next);
            case ReduceOp::min: return apply<Extreme<false>>(result, next);
            case ReduceOp::max: return apply<Extreme<true>>(result, next);
            case ReduceOp::product: return apply<Product>(result, next);
        }
    }
    template <class Op>
    GRADSYNC_ALWAYS_INLINE static void apply(A* __restrict result, const A* __restrict next) {
        for (std::size_t j = 0; j < block; ++j) result[j] = Op::apply(result[j], next[j]);
    }
    GRADSYNC_ALWAYS_INLINE static void multiply(A* result, double factor) {
        if constexpr (std::is_floating_point_v<A>)
            if (factor != 1)
                for (std::size_t j = 0; j < block; ++j) result[j] *= static_cast<A>(factor);
    }
};

/// The hot path: a sum or mean of unscaled inputs, in registers. Each element is loaded once per input and stored once per output. Same
/// bits as BlockedReduce.
template <class T>
struct RegisterSum {
    template <std::size_t register_bytes>
    struct With {
        using Step = Packs<T, register_bytes>;

        GRADSYNC_ALWAYS_INLINE static void run(const Reduction* r) {
            // Loops over a few inputs and outputs cost as much as their bodies, so they are unrolled for up to four ranks (types other than
            // float: for two, to save compile time). Otherwise two steps share the loops, except for low-precision types, whose steps do
            // more (measured: docs/performance.md).
            const std::size_t ranks = r->inputs.size() == r->outputs.size() ? r->inputs.size() : 0;
            if (ranks == 2) return sum_each<2>(r);
            if constexpr (std::is_same_v<T, float>) {
                if (ranks == 3) return sum_each<3>(r);
                if (ranks == 4) return sum_each<4>(r);
            }
            sum_all<is_low_precision(dtype_of<T>) ? 1 : 2>(r->inputs, r->outputs, r->count * sizeof(T), r->factor);
        }

    private:
        using Pack = typename Step::Pack;

        /// For `ranks` inputs and as many outputs, a number that the compiler knows.
        template <std::size_t ranks>
        GRADSYNC_ALWAYS_INLINE static void sum_each(const Reduction* r) {
            const void* inputs[ranks];
            void* outputs[ranks];
            for (std::size_t i = 0; i < ranks; ++i) {
                inputs[i] = r->inputs[i];
                outputs[i] = r->outputs[i];
            }
            sum_all<1>(inputs, outputs, r->count * sizeof(T), r->factor);
        }

        /// Processes `steps` steps per iteration.
        template <std::size_t steps, class Inputs, class Outputs>
        GRADSYNC_ALWAYS_INLINE static void sum_all(const Inputs& inputs, const Outputs& outputs, std::size_t bytes, double factor) {
            constexpr std::size_t all = steps * Step::bytes;
            std::size_t first = 0;
            for (; first + all <= bytes; first += all) sum_some<steps, true>(inputs, outputs, first, all, factor);
            if (first < bytes) sum_some<steps, false>(inputs, outputs, first, bytes - first, factor);
        }

        /// One iteration. If fewer bytes are left (`rest`; `whole` is false), it works on padded copies.
        template <std::size_t steps, bool whole, class Inputs, class Outputs>
        GRADSYNC_ALWAYS_INLINE static void sum_some(const Inputs& inputs, const Outputs& outputs, std::size_t first, std::size_t rest,
                                                    double factor) {
            Pack sum[steps][2];
            load<whole>(inputs[0], first, rest, sum);
            for (std::size_t i = 1; i < std::size(inputs); ++i) {
                Pack next[steps][2];
                load<whole>(inputs[i], first, rest, next);
                for (std::size_t s = 0; s < steps; ++s) {
                    sum[s][0] += next[s][0];
                    sum[s][1] += next[s][1];
                }
            }
            if (factor != 1) {
                for (std::size_t s = 0; s < steps; ++s) {
                    sum[s][0] *= static_cast<typename Step::A>(factor);
                    sum[s][1] *= static_cast<typename Step::A>(factor);
                }
            }
            typename Step::Stored stored[steps][Step::stores];
            for (std::size_t s = 0; s < steps; ++s) Step::round(sum[s], stored[s]);
            std::byte padded[steps * Step::bytes];
            if constexpr (!whole) store(stored, padded);
            for (void* output : outputs) {
                void* const to = static_cast<std::byte*>(output) + first;
                if constexpr (whole) store(stored, to);
                else std::memcpy(to, padded, rest);
            }
        }

        template <bool whole, std::size_t steps>
        GRADSYNC_ALWAYS_INLINE static void load(const void* input, std::size_t first, std::size_t rest, Pack (&to)[steps][2]) {
            const std::byte* from = static_cast<const std::byte*>(input) + first;
            std::byte padded[steps * Step::bytes];
            if constexpr (!whole) {
                std::memset(padded, 0, sizeof padded);
                from = static_cast<const std::byte*>(std::memcpy(padded, from, rest));
            }
            for (std::size_t s = 0; s < steps; ++s) Step::load(from + s * Step::bytes, to[s]);
        }
        template <std::size_t steps>
        GRADSYNC_ALWAYS_INLINE static void store(const typename Step::Stored (&from)[steps][Step::stores], void* to) {
            for (std::size_t s = 0; s < steps; ++s) Step::store(from[s], static_cast<std::byte*>(to) + s * Step::bytes);
        }
    };
};

template <class T>
void reduce(const Reduction& r) {
    if constexpr (std::is_integral_v<T>) return run_baseline<BlockedReduce<T>>(&r);  // rare and small: one copy is enough
    else if ((r.op == ReduceOp::sum || r.op == ReduceOp::mean) && r.scales.empty()) dispatch_vectors<RegisterSum<T>>(&r);
    else dispatch<BlockedReduce<T>>(&r);
}

/// The 8-bit types: block by block, one input after another, with the kernels of f32.
template <class = void>
void reduce_float8(const Reduction& r) {
    alignas(64) float result[float8_block];
    alignas(64) float next[float8_block];
    std::byte rounded[float8_block];
    const void* const both[] = {result, next};
    void* const into[] = {result};
    Reduction step;
    step.outputs = into;
    step.op = r.op;
    for (std::size_t first = 0; first < r.count; first += float8_block) {
        step.count = r.count - first < float8_block ? r.count - first : float8_block;
        const std::size_t inputs = r.inputs.size();
        for (std::size_t i = 0; i < inputs; ++i) {
            const auto* const from = static_cast<const std::byte*>(r.inputs[i]) + first;
            widen_float8(from, r.dtype, i == 0 ? result : next, step.count);
            if (i == 0 && inputs != 1) continue;
            step.inputs = std::span(both).first(i == 0 ? 1 : 2);
            const double scales[] = {r.scales.empty() || i > 1 ? 1 : r.scales[0], r.scales.empty() || i == 0 ? 1 : r.scales[i]};
            if (!r.scales.empty()) step.scales = std::span(scales).first(step.inputs.size());
            step.factor = i + 1 == inputs ? r.factor : 1;
            reduce<float>(step);
        }
        round_float8(result, step.count, rounded, r.dtype);
        for (void* output : r.outputs) std::memcpy(static_cast<std::byte*>(output) + first, rounded, step.count);
    }
}

}  // namespace detail

/// Runs a reduction on the calling thread. Outputs become zero if there are no inputs.
template <class = void>
void reduce(const Reduction& r) {
    if (r.count == 0) return;
    const bool one_to_itself = r.inputs.size() == 1 && r.outputs.size() == 1 && r.inputs[0] == r.outputs[0];
    // In 8-bit types an infinity becomes the largest number, in place as elsewhere.
    if (one_to_itself && r.scales.empty() && r.factor == 1 && !is_float8(r.dtype)) return;
    if (r.inputs.empty()) {
        for (void* output : r.outputs) std::memset(output, 0, r.count * size_of(r.dtype));
        return;
    }
    using detail::reduce, detail::reduce_float8;
    constexpr void (*by_dtype[dtype_count])(const Reduction&) = {
        reduce<std::int8_t>, reduce<std::uint8_t>, reduce<std::int32_t>, reduce<std::uint32_t>, reduce<std::int64_t>, reduce<std::uint64_t>,
        reduce<Float16>,     reduce<BFloat16>,     reduce<float>,        reduce<double>,        reduce_float8<>,      reduce_float8<>};
    by_dtype[static_cast<std::size_t>(r.dtype)](r);
}

#ifdef GRADSYNC_EXTERN_KERNELS  // see instantiations.hpp
extern template void reduce<void>(const Reduction&);
#endif

}  // namespace gradsync::inline v0_2::kernel
