// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <span>

#include "loops.hpp"

namespace gradsync::inline v0_2::kernel {

namespace detail {

// Operations on accumulators.

struct Sum {
    template <class A>
    GRADSYNC_ALWAYS_INLINE static A apply(A a, A x) {
        return a + x;
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

/// The number of sums that follow input i.
inline unsigned sums_after(const Reduction& r, std::size_t i) noexcept {
    return r.sums.empty() ? gradsync::detail::sums_after(i, r.inputs.size()) : r.sums[i];
}

/// Conversions of a type to its accumulator's and back; null if they are the same.
template <class A>
struct Conversions {
    void (*widen)(const void* from, A* to, std::size_t n) = nullptr;
    void (*round)(const A* from, void* to, std::size_t n) = nullptr;
};

/// Any operation on any number of inputs, block by block through accumulators of type A, which stay
/// in the first-level cache. All loops have the length of a whole block, a constant, so that they are vectorised
/// at -O2; the last block is padded.
template <class A>
struct BlockedReduce {
    static constexpr std::size_t block = 256;

    GRADSYNC_ALWAYS_INLINE static void run(const Reduction* r, Conversions<A> conversions) {
        alignas(64) A open[gradsync::detail::max_open_sums][block];  // the stack of sums
        alignas(64) A elements[block] = {};                          // in the type in memory, which is no larger
        const std::size_t size = size_of(r->dtype);
        for (std::size_t first = 0; first < r->count; first += block) {
            const std::size_t n = r->count - first < block ? r->count - first : block;
            auto* top = open;  // one past the last
            for (std::size_t i = 0; i < r->inputs.size(); ++i) {
                const void* from = static_cast<const std::byte*>(r->inputs[i]) + first * size;
                if (n < block) from = std::memcpy(elements, from, n * size);
                if (conversions.widen) conversions.widen(from, *top, block);
                else std::memcpy(*top, from, sizeof *top);
                if (!r->scales.empty()) multiply(*top, r->scales[i]);
                ++top;
                for (unsigned sums = sums_after(*r, i); sums != 0; --sums, --top) combine(r->op, top[-2], top[-1]);
            }
            multiply(*open, r->factor);
            const void* rounded = *open;  // once, then copied to all outputs from the cache
            if (conversions.round) conversions.round(*open, elements, block), rounded = elements;
            for (void* output : r->outputs)
                std::memcpy(static_cast<std::byte*>(output) + first * size, rounded, n * size);
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

/// A vector type with `bytes` bytes of numbers. Pass it by reference only: the convention for passing it by value
/// depends on the instruction set.
template <class T, std::size_t bytes>
struct Pack {
    using type [[gnu::vector_size(bytes)]] = T;
};

/// One step of a loop that keeps its elements in registers: two packs of the accumulator type of T. It gives the same
/// bits as `convert_block`.
///
/// The order of elements within the packs is free, as long as all loads and stores agree.
/// A 32-bit word therefore holds two elements of a 16-bit type: the lower halves widen to the first pack and the upper
/// halves to the second, without a shuffle.
template <Element T, std::size_t register_bytes>
struct Packs {
private:
    /// True if F16C converts, which is part of `Isa::avx2` and wider. It gives the same bits, even if the thread
    /// flushes to zero.
    static constexpr bool processor_converts =
        GRADSYNC_X86_DISPATCH && std::is_same_v<T, Float16> && register_bytes >= 32;

    using Words = typename detail::Pack<std::uint32_t, register_bytes>::type;
    /// The elements of a register, in 16 bits each.
    using HalfWords = typename detail::Pack<std::uint32_t, register_bytes / 2>::type;

public:
    using A = accumulator_t<T>;
    using Pack = typename detail::Pack<A, register_bytes>::type;

    static constexpr std::size_t elements = 2 * sizeof(Pack) / sizeof(A);
    static constexpr std::size_t bytes = elements * sizeof(T);

    /// Elements of a step, as in memory.
    using Stored = std::conditional_t<processor_converts, HalfWords,
                                      std::conditional_t<is_low_precision(dtype_of<T>), Words, Pack>>;
    static constexpr std::size_t stores = bytes / sizeof(Stored);

    GRADSYNC_ALWAYS_INLINE static void load(const void* from, Pack (&to)[2]) {
        Stored stored[stores];
        for (std::size_t i = 0; i < stores; ++i) stored[i] = static_cast<const Unaligned*>(from)[i];
        if constexpr (processor_converts) {
            widen_half(stored[0], to[0]);
            widen_half(stored[1], to[1]);
        } else if constexpr (is_low_precision(dtype_of<T>)) {
            widen<T>(stored[0] & 0xffffu, to[0]);
            widen<T>(stored[0] >> 16, to[1]);
        } else {
            to[0] = stored[0];
            to[1] = stored[1];
        }
    }

    /// Rounds a step's elements; call it once, then `store` for each output.
    GRADSYNC_ALWAYS_INLINE static void round(const Pack (&from)[2], Stored (&to)[stores]) {
        if constexpr (processor_converts) {
            narrow_half(from[0], to[0]);
            narrow_half(from[1], to[1]);
        } else if constexpr (is_low_precision(dtype_of<T>)) {
            Words lower, upper;
            narrow<T>(from[0], lower);
            narrow<T>(from[1], upper);
            to[0] = lower | upper << 16;
        } else {
            to[0] = from[0];
            to[1] = from[1];
        }
    }

    GRADSYNC_ALWAYS_INLINE static void store(const Stored (&from)[stores], void* to) {
        for (std::size_t i = 0; i < stores; ++i) static_cast<Unaligned*>(to)[i] = from[i];
    }

private:
    // An unaligned type of a whole register, because GCC does not turn a memcpy into one register load.
    using Unaligned [[gnu::aligned(1), gnu::may_alias]] = Stored;

#if defined(__clang__)
    using Halves [[gnu::vector_size(register_bytes / 2)]] = __fp16;

    GRADSYNC_ALWAYS_INLINE static void widen_half(const HalfWords& from, Pack& to) {
        to = __builtin_convertvector(__builtin_bit_cast(Halves, from), Pack);
    }
    GRADSYNC_ALWAYS_INLINE static void narrow_half(const Pack& from, HalfWords& to) {
        to = __builtin_bit_cast(HalfWords, __builtin_convertvector(from, Halves));
        // Otherwise Clang 14 keeps the elements as halves, and stores them one by one in loops.
        asm("" : "+m"(to));
    }
#else
    // GCC 12 has vectors of half precision only for AVX512-FP16.
    GRADSYNC_ALWAYS_INLINE static void widen_half(const HalfWords& from, Pack& to) {
        asm("vcvtph2ps {%1, %0|%0, %1}" : "=v"(to) : "vm"(from));
    }
    GRADSYNC_ALWAYS_INLINE static void narrow_half(const Pack& from, HalfWords& to) {
        asm("vcvtps2ph {$0, %1, %0|%0, %1, 0}" : "=v"(to) : "v"(from));  // 0: ties to even
    }
#endif
};

/// Sums the elements from element `first` on, one by one: the rest that fills no register.
template <class T>
[[gnu::noinline]] void sum_rest(const Reduction& r, std::size_t first) {
    using A = accumulator_t<T>;
    for (; first < r.count; ++first) {
        A open[gradsync::detail::max_open_sums];
        A* top = open;
        const auto input = [&](std::size_t i) { return static_cast<A>(static_cast<const T*>(r.inputs[i])[first]); };
        std::size_t i = 0;
        if (r.inputs.size() == 2) *top++ = input(0) + input(1), i = 2;
        for (; i < r.inputs.size(); ++i) {
            *top++ = input(i);
            if (r.sums.empty())  // counted without instructions that not every processor has
                for (std::size_t nodes = i + 1; nodes % 2 == 0; nodes /= 2, --top) top[-2] += top[-1];
            else
                for (unsigned sums = r.sums[i]; sums != 0; --sums, --top) top[-2] += top[-1];
        }
        for (; top - open > 1; --top) top[-2] += top[-1];
        if (r.factor != 1) *open *= static_cast<A>(r.factor);
        for (void* output : r.outputs) static_cast<T*>(output)[first] = static_cast<T>(*open);
    }
}

/// The hot path: a sum or mean of unscaled inputs, in registers. Each element is loaded once per input and stored once
/// per output. Same bits as BlockedReduce.
template <class T>
struct RegisterSum {
    template <std::size_t register_bytes>
    struct With {
        using Step = Packs<T, register_bytes>;

        GRADSYNC_ALWAYS_INLINE static void run(const Reduction* r) {
            // Loops over a few inputs and outputs cost as much as their bodies, so they are unrolled for up to four
            // ranks (types other than float: for two, to save compile time). Otherwise two steps share the loops,
            // except for low-precision types, whose steps do more (measured: docs/background/lab-notes.md).
            const std::size_t ranks = r->inputs.size() == r->outputs.size() ? r->inputs.size() : 0;
            std::size_t first = 0;
            if (ranks == 2) first = sum_each<2>(r);
            if constexpr (std::is_same_v<T, float> && !rarely_used) {
                if (ranks == 3) first = sum_each<3>(r);
                if (ranks == 4) first = sum_each<4>(r);
            }
            constexpr std::size_t steps = is_low_precision(dtype_of<T>) || rarely_used ? 1 : 2;
            if (first == 0) {
                first = sum_all<steps>(r->inputs, r->outputs, r->count * sizeof(T), r->factor);
                if constexpr (steps > 1)
                    first = sum_all<1>(r->inputs, r->outputs, r->count * sizeof(T), r->factor, first);
            }
            if (first / sizeof(T) < r->count) sum_rest<T>(*r, first / sizeof(T));
        }

    private:
        using Pack = typename Step::Pack;

        /// For processors without AVX2 one loop is enough.
        static constexpr bool rarely_used = GRADSYNC_X86_DISPATCH && register_bytes < 32;

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

        /// Processes `steps` steps per iteration, from byte `first` on. Returns the number of bytes done:
        /// all whole iterations.
        template <std::size_t steps, class Inputs, class Outputs>
        GRADSYNC_ALWAYS_INLINE static std::size_t sum_all(const Inputs& inputs, const Outputs& outputs,
                                                          std::size_t bytes, double factor, std::size_t first = 0) {
            constexpr std::size_t all = steps * Step::bytes;
            for (; first + all <= bytes; first += all) sum_some<steps>(inputs, outputs, first, factor);
            return first;
        }

        template <std::size_t steps, class Inputs, class Outputs>
        GRADSYNC_ALWAYS_INLINE static void sum_some(const Inputs& inputs, const Outputs& outputs, std::size_t first,
                                                    double factor) {
            const std::size_t n = std::size(inputs), groups = (n + 7) / 8;
            Pack sum[steps][2];
            sum_up<8>(&inputs[0], n, first, sum);
            if (groups > 1) {
                Pack open[gradsync::detail::max_open_sums][steps][2];
                std::size_t top = 0;
                for (std::size_t g = 1; g < groups; ++g) {
                    for (std::size_t s = 0; s < steps; ++s) open[top][s][0] = sum[s][0], open[top][s][1] = sum[s][1];
                    ++top;
                    sum_up<8>(&inputs[8 * g], n - 8 * g, first, sum);
                    for (unsigned sums = gradsync::detail::sums_after(g, groups); sums != 0; --sums)
                        add<steps>(open[--top], sum, sum);
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
            for (void* output : outputs)
                for (std::size_t s = 0; s < steps; ++s)
                    Step::store(stored[s], static_cast<std::byte*>(output) + first + s * Step::bytes);
        }

        /// The sum of `most` inputs, a power of two, or of `n` if there are fewer: the sum of its two halves.
        template <std::size_t most, std::size_t steps>
        GRADSYNC_ALWAYS_INLINE static void sum_up(const void* const* inputs, std::size_t n, std::size_t first,
                                                  Pack (&sum)[steps][2]) {
            if constexpr (most == 1) {
                load(inputs[0], first, sum);
            } else {
                sum_up<most / 2>(inputs, n, first, sum);
                if (n <= most / 2) return;
                Pack next[steps][2];
                sum_up<most / 2>(inputs + most / 2, n - most / 2, first, next);
                add<steps>(sum, next, sum);
            }
        }
        template <std::size_t steps>
        GRADSYNC_ALWAYS_INLINE static void add(const Pack (&left)[steps][2], const Pack (&right)[steps][2],
                                               Pack (&sum)[steps][2]) {
            for (std::size_t s = 0; s < steps; ++s) {
                sum[s][0] = left[s][0] + right[s][0];
                sum[s][1] = left[s][1] + right[s][1];
            }
        }

        template <std::size_t steps>
        GRADSYNC_ALWAYS_INLINE static void load(const void* input, std::size_t first, Pack (&to)[steps][2]) {
            for (std::size_t s = 0; s < steps; ++s)
                Step::load(static_cast<const std::byte*>(input) + first + s * Step::bytes, to[s]);
        }
    };
};

template <class T, std::uint64_t flipped>
constexpr Conversions<std::uint64_t> conversions_of_integer() {
    return {[](const void* from, std::uint64_t* to, std::size_t n) {
                for (std::size_t i = 0; i < n; ++i)
                    to[i] = static_cast<std::uint64_t>(static_cast<const T*>(from)[i]) ^ flipped;
            },
            [](const std::uint64_t* from, void* to, std::size_t n) {
                for (std::size_t i = 0; i < n; ++i) static_cast<T*>(to)[i] = static_cast<T>(from[i] ^ flipped);
            }};
}

/// Reduces in unsigned 64-bit integers, which wrap around. One copy is enough, because integer
/// reductions are rare and small.
template <class T>
void reduce_integers(const Reduction& r) {
    // With their top bits flipped, signed numbers compare as unsigned ones do.
    constexpr std::uint64_t top = std::is_signed_v<T> ? std::uint64_t{1} << 63 : 0;
    const bool compares = r.op == ReduceOp::min || r.op == ReduceOp::max;
    run_baseline<BlockedReduce<std::uint64_t>>(
        &r, compares ? conversions_of_integer<T, top>() : conversions_of_integer<T, 0>());
}

}  // namespace detail

/// Runs a reduction on the calling thread. Outputs become zero if there are no inputs.
inline void reduce(const Reduction& r) {
    using namespace detail;
    if (r.count == 0) return;
    const bool one_to_itself = r.inputs.size() == 1 && r.outputs.size() == 1 && r.inputs[0] == r.outputs[0];
    // In 8-bit types an infinity becomes the largest number, also in place.
    if (one_to_itself && r.scales.empty() && r.factor == 1 && !is_float8(r.dtype)) return;
    if (r.inputs.empty()) {
        for (void* output : r.outputs) std::memset(output, 0, r.count * size_of(r.dtype));
        return;
    }
    const bool in_registers = (r.op == ReduceOp::sum || r.op == ReduceOp::mean) && r.scales.empty() && r.sums.empty();
    switch (r.dtype) {
        case DType::i8: return reduce_integers<std::int8_t>(r);
        case DType::u8: return reduce_integers<std::uint8_t>(r);
        case DType::i32: return reduce_integers<std::int32_t>(r);
        case DType::u32: return reduce_integers<std::uint32_t>(r);
        case DType::i64: return reduce_integers<std::int64_t>(r);
        case DType::u64: return reduce_integers<std::uint64_t>(r);
        case DType::f32:
            if (in_registers) return dispatch_vectors<RegisterSum<float>>(&r);
            return dispatch<BlockedReduce<float>>(&r, Conversions<float>());
        case DType::f64:  // the library itself sums a few f64, also in programs without that type
            if (in_registers && tables[static_cast<std::size_t>(DType::f64)].load(std::memory_order_relaxed) == nullptr)
                return sum_rest<double>(r, 0);
            [[fallthrough]];
        default:
            const Kernels& kernels = kernels_of(r.dtype);
            if (in_registers && kernels.sum != nullptr) return kernels.sum(&r);
            if (kernels.reduce != nullptr) return kernels.reduce(&r);
            dispatch<BlockedReduce<float>>(&r, Conversions<float>{kernels.to_f32, kernels.from_f32});
    }
}

}  // namespace gradsync::inline v0_2::kernel
