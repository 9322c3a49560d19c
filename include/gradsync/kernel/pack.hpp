// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../core/dtype.hpp"
#include "convert.hpp"
#include "isa.hpp"

namespace gradsync::inline v0_2::kernel {

/// One step of a loop that keeps its elements in registers: two packs of the accumulator type of T. It gives the same bits as `convert_block`.
///
/// The order of elements within the packs is free, as long as all loads and stores agree. A 32-bit word therefore holds two elements of a
/// 16-bit type: the lower halves widen to the first pack and the upper halves to the second, without a shuffle.
template <Element T, std::size_t register_bytes>
struct Packs {
private:
    /// True if F16C converts, which is part of `Isa::avx2` and wider. It gives the same bits, even if the thread flushes to zero.
    static constexpr bool processor_converts = GRADSYNC_X86_DISPATCH && std::is_same_v<T, Float16> && register_bytes >= 32;

    using Floats = detail::Pack<float, register_bytes>;
    using Words = typename detail::Pack<std::uint32_t, register_bytes>::type;
    using HalfWords = typename detail::Pack<std::uint32_t, register_bytes / 2>::type;  ///< the elements of a register, in 16 bits each

public:
    using A = accumulator_t<T>;
    using Pack = typename detail::Pack<A, register_bytes>::type;

    static constexpr std::size_t elements = 2 * sizeof(Pack) / sizeof(A);
    static constexpr std::size_t bytes = elements * sizeof(T);

    /// Elements of a step, as in memory.
    using Stored = std::conditional_t<processor_converts, HalfWords, std::conditional_t<is_low_precision(dtype_of<T>), Words, Pack>>;
    static constexpr std::size_t stores = bytes / sizeof(Stored);

    GRADSYNC_ALWAYS_INLINE static void load(const void* from, Pack (&to)[2]) {
        Stored stored[stores];
        for (std::size_t i = 0; i < stores; ++i) stored[i] = static_cast<const Unaligned*>(from)[i];
        if constexpr (processor_converts) {
            widen_half(stored[0], to[0]);
            widen_half(stored[1], to[1]);
        } else if constexpr (is_low_precision(dtype_of<T>)) {
            detail::widen<T, Floats>(stored[0] & 0xffffu, to[0]);
            detail::widen<T, Floats>(stored[0] >> 16, to[1]);
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
            detail::narrow<T, Floats>(from[0], lower);
            detail::narrow<T, Floats>(from[1], upper);
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

}  // namespace gradsync::inline v0_2::kernel
