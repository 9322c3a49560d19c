// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <span>
#include <type_traits>

#include "../core/dtype.hpp"
#include "../core/reduce_op.hpp"
#include "isa.hpp"
#include "kernels.hpp"
#include "pack.hpp"

namespace gradsync::inline v0_2::kernel {

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

/// Conversions of a type to its accumulator's and back; null if they are the same.
template <class A>
struct Conversions {
    void (*widen)(const void* from, A* to, std::size_t n) = nullptr;
    void (*round)(const A* from, void* to, std::size_t n) = nullptr;
};

/// Any operation on any number of inputs, block by block through accumulators of type A, which stay in the first-level cache. All loops have
/// the length of a whole block, a constant, so that they are vectorised at -O2; the last block is padded.
template <class A>
struct BlockedReduce {
    static constexpr std::size_t block = 256;

    GRADSYNC_ALWAYS_INLINE static void run(const Reduction* r, Conversions<A> conversions) {
        alignas(64) A result[block];
        alignas(64) A next[block];
        alignas(64) A elements[block] = {};  // of the type in memory, which is no larger
        const std::size_t size = size_of(r->dtype);
        for (std::size_t first = 0; first < r->count; first += block) {
            const std::size_t n = r->count - first < block ? r->count - first : block;
            for (std::size_t i = 0; i < r->inputs.size(); ++i) {
                A* const into = i == 0 ? result : next;
                const void* from = static_cast<const std::byte*>(r->inputs[i]) + first * size;
                if (n < block) from = std::memcpy(elements, from, n * size);
                if (conversions.widen) conversions.widen(from, into, block);
                else std::memcpy(into, from, sizeof result);
                if (!r->scales.empty()) multiply(into, r->scales[i]);
                if (i != 0) combine(r->op, result, next);
            }
            multiply(result, r->factor);
            const void* rounded = result;  // once, then copied to all outputs from the cache
            if (conversions.round) conversions.round(result, elements, block), rounded = elements;
            for (void* output : r->outputs) std::memcpy(static_cast<std::byte*>(output) + first * size, rounded, n * size);
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
            std::size_t first = 0;
            if (ranks == 2) first = sum_each<2>(r);
            else if (std::is_same_v<T, float> && ranks == 3) first = sum_each<3>(r);
            else if (std::is_same_v<T, float> && ranks == 4) first = sum_each<4>(r);
            else first = sum_all<is_low_precision(dtype_of<T>) ? 1 : 2>(r->inputs, r->outputs, r->count * sizeof(T), r->factor);
            for (const std::size_t bytes = r->count * sizeof(T); first < bytes; first += Step::bytes)
                sum_some<1, false>(r->inputs, r->outputs, first, bytes - first < Step::bytes ? bytes - first : Step::bytes, r->factor);
        }

    private:
        using Pack = typename Step::Pack;

        /// For `ranks` inputs and as many outputs, a number that the compiler knows.
        template <std::size_t ranks>
        GRADSYNC_ALWAYS_INLINE static std::size_t sum_each(const Reduction* r) {
            const void* inputs[ranks];
            void* outputs[ranks];
            for (std::size_t i = 0; i < ranks; ++i) {
                inputs[i] = r->inputs[i];
                outputs[i] = r->outputs[i];
            }
            return sum_all<1>(inputs, outputs, r->count * sizeof(T), r->factor);
        }

        /// Processes `steps` steps per iteration. Returns the number of bytes done: all whole iterations.
        template <std::size_t steps, class Inputs, class Outputs>
        GRADSYNC_ALWAYS_INLINE static std::size_t sum_all(const Inputs& inputs, const Outputs& outputs, std::size_t bytes, double factor) {
            constexpr std::size_t all = steps * Step::bytes;
            std::size_t first = 0;
            for (; first + all <= bytes; first += all) sum_some<steps, true>(inputs, outputs, first, all, factor);
            return first;
        }

        /// One iteration. If `whole` is false, it works on padded copies of `rest` bytes, at most a step.
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

template <class T, class A>
void reduce_integers(const Reduction& r) {
    Conversions<A> conversions;
    if constexpr (sizeof(T) != sizeof(A)) {
        conversions.widen = [](const void* from, A* to, std::size_t n) {
            for (std::size_t i = 0; i < n; ++i) to[i] = static_cast<const T*>(from)[i];
        };
        conversions.round = [](const A* from, void* to, std::size_t n) {
            for (std::size_t i = 0; i < n; ++i) static_cast<T*>(to)[i] = static_cast<T>(from[i]);
        };
    }
    run_baseline<BlockedReduce<A>>(&r, conversions);  // rare and small: one copy is enough
}

}  // namespace detail

/// Runs a reduction on the calling thread. Outputs become zero if there are no inputs.
inline void reduce(const Reduction& r) {
    using namespace detail;
    if (r.count == 0) return;
    const bool one_to_itself = r.inputs.size() == 1 && r.outputs.size() == 1 && r.inputs[0] == r.outputs[0];
    // In 8-bit types an infinity becomes the largest number, in place as elsewhere.
    if (one_to_itself && r.scales.empty() && r.factor == 1 && !is_float8(r.dtype)) return;
    if (r.inputs.empty()) {
        for (void* output : r.outputs) std::memset(output, 0, r.count * size_of(r.dtype));
        return;
    }
    const bool in_registers = (r.op == ReduceOp::sum || r.op == ReduceOp::mean) && r.scales.empty();
    switch (r.dtype) {
        case DType::i8: return reduce_integers<std::int8_t, std::int64_t>(r);
        case DType::u8: return reduce_integers<std::uint8_t, std::uint64_t>(r);
        case DType::i32: return reduce_integers<std::int32_t, std::int64_t>(r);
        case DType::u32: return reduce_integers<std::uint32_t, std::uint64_t>(r);
        case DType::i64: return reduce_integers<std::int64_t, std::int64_t>(r);
        case DType::u64: return reduce_integers<std::uint64_t, std::uint64_t>(r);
        case DType::f32:
            if (in_registers) return dispatch_vectors<RegisterSum<float>>(&r);
            return dispatch<BlockedReduce<float>>(&r, Conversions<float>());
        default:
            const Kernels& kernels = kernels_of(r.dtype);
            if (in_registers && kernels.sum != nullptr) return kernels.sum(&r);
            if (kernels.reduce != nullptr) return kernels.reduce(&r);
            dispatch<BlockedReduce<float>>(&r, Conversions<float>{kernels.to_f32, kernels.from_f32});
    }
}

}  // namespace gradsync::inline v0_2::kernel
