#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>

#include "../core/dtype.hpp"
#include "../core/reduce_op.hpp"
#include "convert.hpp"
#include "isa.hpp"

namespace gradsync::inline v0::kernel {

/// One fused pass: combines the inputs, in the order in which they stand, and writes the result to every output.
/// For all kernels that reduce: ranks that share an address space, or a window of it.
///
/// `inputs[i]` and `outputs[j]` point to `count` elements of `dtype` each; an output may be one of the inputs,
/// or lie apart from all of them. Input i is multiplied by `scales[i]` first (empty: by 1), and the result by
/// `factor` last; both are for floating types. Everything happens in the accumulator's type (`accumulator_of`),
/// rounded once. An element's bits depend on nothing but the inputs and their order.
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

/// Elements that one step of a general reduction keeps in the first-level cache.
inline constexpr std::size_t reduction_block = 256;

struct Sum {
    template <class A>
    GRADSYNC_ALWAYS_INLINE static A apply(A a, A x) {
        if constexpr (std::is_integral_v<A>) {  // wraps around, for signed types too
            using U = std::make_unsigned_t<A>;
            return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(x)));
        } else return a + x;
    }
};
struct Product {
    template <class A>
    GRADSYNC_ALWAYS_INLINE static A apply(A a, A x) {
        if constexpr (std::is_integral_v<A>) {
            using U = std::common_type_t<std::make_unsigned_t<A>, unsigned>;
            return static_cast<A>(static_cast<U>(a) * static_cast<U>(x));
        } else return a * x;
    }
};
struct Min {  // a NaN wins
    template <class A>
    GRADSYNC_ALWAYS_INLINE static A apply(A a, A x) { return x < a || x != x ? x : a; }
};
struct Max {
    template <class A>
    GRADSYNC_ALWAYS_INLINE static A apply(A a, A x) { return x > a || x != x ? x : a; }
};

/// Any type, any operation, any number of inputs: block by block through an accumulator.
template <class T, class Op>
struct BlockedReduce {
    using A = accumulator_t<T>;

    /// `n` is the constant `block` for all blocks but the last, so that the loops vectorise at -O2 already.
    GRADSYNC_ALWAYS_INLINE static void step(const Reduction& r, std::size_t first, std::size_t n) {
        alignas(64) A sum[reduction_block];
        alignas(64) A next[reduction_block];
        for (std::size_t i = 0; i < r.inputs.size(); ++i) {
            A* into = i == 0 ? sum : next;
            load_block(static_cast<const T*>(r.inputs[i]) + first, into, n);
            if constexpr (std::is_floating_point_v<A>) {
                if (!r.scales.empty() && r.scales[i] != 1) {
                    const A scale = static_cast<A>(r.scales[i]);
                    for (std::size_t j = 0; j < n; ++j) into[j] *= scale;
                }
            }
            if (i != 0)
                for (std::size_t j = 0; j < n; ++j) sum[j] = Op::apply(sum[j], next[j]);
        }
        if constexpr (std::is_floating_point_v<A>) {
            if (r.factor != 1) {
                const A factor = static_cast<A>(r.factor);
                for (std::size_t j = 0; j < n; ++j) sum[j] *= factor;
            }
        }
        if (r.outputs.empty()) return;
        T* const result = static_cast<T*>(r.outputs[0]) + first;
        store_block(sum, result, n);  // rounded once, copied from the cache
        for (void* output : r.outputs.subspan(1)) std::memcpy(static_cast<T*>(output) + first, result, n * sizeof(T));
    }

    GRADSYNC_ALWAYS_INLINE static void run(const Reduction* r) {
        std::size_t first = 0;
        for (; first + reduction_block <= r->count; first += reduction_block) step(*r, first, reduction_block);
        if (first < r->count) step(*r, first, r->count - first);
    }
};

#if defined(__GNUC__) || defined(__clang__)
/// The hot path: a sum or mean of 2, 3 or 4 inputs in place, in registers, one load and one store an element
/// and rank.
template <class T, std::size_t ranks>
struct InPlaceSum {
    using Pack [[gnu::vector_size(64), gnu::aligned(alignof(T)), gnu::may_alias]] = T;

    template <bool scaled>
    GRADSYNC_ALWAYS_INLINE static void loop(T* const (&p)[ranks], std::size_t n, T factor) {
        constexpr std::size_t lanes = 64 / sizeof(T);
        std::size_t i = 0;
        for (; i + lanes <= n; i += lanes) {
            Pack sum = *reinterpret_cast<const Pack*>(p[0] + i);
            for (std::size_t k = 1; k < ranks; ++k) sum += *reinterpret_cast<const Pack*>(p[k] + i);
            if constexpr (scaled) sum *= factor;
            for (std::size_t k = 0; k < ranks; ++k) *reinterpret_cast<Pack*>(p[k] + i) = sum;
        }
        for (; i < n; ++i) {
            T sum = p[0][i];
            for (std::size_t k = 1; k < ranks; ++k) sum += p[k][i];
            if constexpr (scaled) sum *= factor;
            for (std::size_t k = 0; k < ranks; ++k) p[k][i] = sum;
        }
    }

    GRADSYNC_ALWAYS_INLINE static void run(const Reduction* r) {
        T* p[ranks];
        for (std::size_t k = 0; k < ranks; ++k) p[k] = static_cast<T*>(r->outputs[k]);
        if (r->factor == 1) loop<false>(p, r->count, T{1});
        else loop<true>(p, r->count, static_cast<T>(r->factor));
    }
};

/// Runs the hot path where it applies.
template <class T>
bool reduce_in_place(const Reduction& r) {
    if (r.op != ReduceOp::sum && r.op != ReduceOp::mean) return false;
    if (!r.scales.empty() || !std::equal(r.inputs.begin(), r.inputs.end(), r.outputs.begin(), r.outputs.end())) return false;
    switch (r.inputs.size()) {
        case 2: dispatch<InPlaceSum<T, 2>>(&r); return true;
        case 3: dispatch<InPlaceSum<T, 3>>(&r); return true;
        case 4: dispatch<InPlaceSum<T, 4>>(&r); return true;
        default: return false;
    }
}
#else
template <class T>
bool reduce_in_place(const Reduction&) { return false; }
#endif

template <class T, class Op>
void reduce_blocks(const Reduction& r) {
    // Integers are rare and small here: one copy of their code is enough.
    if constexpr (std::is_integral_v<T>) run_baseline<BlockedReduce<T, Op>>(&r);
    else dispatch<BlockedReduce<T, Op>>(&r);
}

template <class T>
void reduce(const Reduction& r) {
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>)
        if (reduce_in_place<T>(r)) return;
    switch (r.op) {
        case ReduceOp::sum:
        case ReduceOp::mean: return reduce_blocks<T, Sum>(r);
        case ReduceOp::min: return reduce_blocks<T, Min>(r);
        case ReduceOp::max: return reduce_blocks<T, Max>(r);
        case ReduceOp::product: return reduce_blocks<T, Product>(r);
    }
}

}  // namespace detail

/// Runs a reduction on the calling thread. Without inputs the outputs become zero.
inline void reduce(const Reduction& r) {
    if (r.count == 0) return;
    const bool one_to_itself = r.inputs.size() == 1 && r.outputs.size() == 1 && r.inputs[0] == r.outputs[0];
    if (one_to_itself && r.scales.empty() && r.factor == 1) return;
    if (r.inputs.empty()) {
        for (void* output : r.outputs) std::memset(output, 0, r.count * size_of(r.dtype));
        return;
    }
    switch (r.dtype) {
        case DType::i8: return detail::reduce<std::int8_t>(r);
        case DType::u8: return detail::reduce<std::uint8_t>(r);
        case DType::i32: return detail::reduce<std::int32_t>(r);
        case DType::u32: return detail::reduce<std::uint32_t>(r);
        case DType::i64: return detail::reduce<std::int64_t>(r);
        case DType::u64: return detail::reduce<std::uint64_t>(r);
        case DType::f16: return detail::reduce<Float16>(r);
        case DType::bf16: return detail::reduce<BFloat16>(r);
        case DType::f32: return detail::reduce<float>(r);
        case DType::f64: return detail::reduce<double>(r);
    }
}

}  // namespace gradsync::inline v0::kernel
