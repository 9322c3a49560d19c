#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../core/dtype.hpp"
#include "convert.hpp"
#include "isa.hpp"

namespace gradsync::inline v0::kernel {

/// One step of a loop that keeps its elements in registers: two packs of the accumulator type of T. Same bits as
/// `load_block` and `store_block`.
///
/// The order of elements within the packs is free, as long as all loads and stores agree. So the 16-bit types lie in
/// 32-bit words, two in each, of which the lower ones widen to the first pack and the upper ones to the second, without
/// a shuffle.
template <Element T, std::size_t register_bytes>
struct Packs {
    using A = accumulator_t<T>;
    using Pack = typename detail::Pack<A, register_bytes>::type;

    static constexpr std::size_t elements = 2 * sizeof(Pack) / sizeof(A);
    static constexpr std::size_t bytes = elements * sizeof(T);

    GRADSYNC_ALWAYS_INLINE static void load(const void* from, Pack (&to)[2]) {
        if constexpr (processor_converts) {
            widen_half(from, to[0]);
            widen_half(static_cast<const std::byte*>(from) + bytes / 2, to[1]);
        } else if constexpr (is_low_precision(dtype_of<T>)) {
            Words words;
            read(from, words);
            detail::widen<T, Numbers>(words & 0xffffu, to[0]);
            detail::widen<T, Numbers>(words >> 16, to[1]);
        } else {
            read(from, to[0]);
            read(static_cast<const std::byte*>(from) + bytes / 2, to[1]);
        }
    }

    GRADSYNC_ALWAYS_INLINE static void store(const Pack (&from)[2], void* to) {
        if constexpr (processor_converts) {
            narrow_half(from[0], to);
            narrow_half(from[1], static_cast<std::byte*>(to) + bytes / 2);
        } else if constexpr (is_low_precision(dtype_of<T>)) {
            Words lower, upper;
            detail::narrow<T, Numbers>(from[0], lower);
            detail::narrow<T, Numbers>(from[1], upper);
            write(lower | upper << 16, to);
        } else {
            write(from[0], to);
            write(from[1], static_cast<std::byte*>(to) + bytes / 2);
        }
    }

private:
    using Numbers = detail::Pack<float, register_bytes>;
    using Words = typename detail::Pack<std::uint32_t, register_bytes>::type;

    /// F16C, a part of `Isa::avx2` and wider. It gives the same bits, also where the thread flushes to zero.
    static constexpr bool processor_converts = GRADSYNC_X86_DISPATCH && std::is_same_v<T, Float16> && register_bytes >= 32;

    // Unaligned types of half a step or a whole one, because GCC makes no register load of a memcpy.
#if defined(__clang__)
    using Halves [[gnu::vector_size(register_bytes / 2), gnu::aligned(1), gnu::may_alias]] = __fp16;

    GRADSYNC_ALWAYS_INLINE static void widen_half(const void* from, Pack& to) {
        to = __builtin_convertvector(*static_cast<const Halves*>(from), Pack);
    }
    GRADSYNC_ALWAYS_INLINE static void narrow_half(const Pack& from, void* to) {
        *static_cast<Halves*>(to) = __builtin_convertvector(from, Halves);
    }
#elif defined(__GNUC__)
    // GCC 12 has vectors of half precision only for AVX512-FP16.
    using Halves [[gnu::vector_size(register_bytes / 2), gnu::aligned(1), gnu::may_alias]] = std::uint16_t;

    GRADSYNC_ALWAYS_INLINE static void widen_half(const void* from, Pack& to) {
        asm("vcvtph2ps {%1, %0|%0, %1}" : "=v"(to) : "m"(*static_cast<const Halves*>(from)));
    }
    GRADSYNC_ALWAYS_INLINE static void narrow_half(const Pack& from, void* to) {
        asm("vcvtps2ph {$0, %1, %0|%0, %1, 0}" : "=m"(*static_cast<Halves*>(to)) : "v"(from));  // 0: ties to even
    }
#endif

    template <class P>
    GRADSYNC_ALWAYS_INLINE static void read(const void* from, P& to) {
#if defined(__GNUC__) || defined(__clang__)
        using Unaligned [[gnu::aligned(1), gnu::may_alias]] = P;
        to = *static_cast<const Unaligned*>(from);
#else
        std::memcpy(&to, from, sizeof to);
#endif
    }
    template <class P>
    GRADSYNC_ALWAYS_INLINE static void write(const P& from, void* to) {
#if defined(__GNUC__) || defined(__clang__)
        using Unaligned [[gnu::aligned(1), gnu::may_alias]] = P;
        *static_cast<Unaligned*>(to) = from;
#else
        std::memcpy(to, &from, sizeof from);
#endif
    }
};

}  // namespace gradsync::inline v0::kernel
