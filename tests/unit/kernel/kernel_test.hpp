// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <gradsync/kernel/convert.hpp>
#include <gradsync/kernel/isa.hpp>
#include <gradsync/kernel/tables.hpp>

/// What the tests of all kernels need: elements by their bits, and one kernel on one instruction set.

namespace gradsync_test {

template <class T>
constexpr bool is_half = gradsync::is_low_precision(gradsync::dtype_of<T>);

template <class T>
auto bits_of(T value) {
    if constexpr (is_half<T>) return value.bits();
    else if constexpr (std::is_same_v<T, float>) return std::bit_cast<std::uint32_t>(value);
    else if constexpr (std::is_same_v<T, double>) return std::bit_cast<std::uint64_t>(value);
    else return value;
}

template <class T>
T from_bits(std::uint64_t bits) {
    if constexpr (is_half<T>) return T::from_bits(static_cast<decltype(T{}.bits())>(bits));
    else if constexpr (std::is_same_v<T, float>) return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    else if constexpr (std::is_same_v<T, double>) return std::bit_cast<double>(bits);
    else return static_cast<T>(bits);
}

/// The library's conversion of types known at compile time.
template <class From, class To>
void convert(const From* from, To* to, std::size_t n) {
    gradsync::kernel::register_kernels<gradsync::dtype_of<From>>();
    gradsync::kernel::register_kernels<gradsync::dtype_of<To>>();
    gradsync::kernel::convert(from, gradsync::dtype_of<From>, to, gradsync::dtype_of<To>, n);
}

/// The accumulator that holds an element's value.
template <class T>
gradsync::kernel::accumulator_t<T> widened(T value) {
    return static_cast<gradsync::kernel::accumulator_t<T>>(value);
}

template <class T>
bool is_nan([[maybe_unused]] T value) {
    if constexpr (is_half<T>) return is_nan(widened(value));
    else if constexpr (std::is_same_v<T, float>) return (bits_of(value) & 0x7fff'ffffu) > 0x7f80'0000u;
    else if constexpr (std::is_same_v<T, double>) return (bits_of(value) & 0x7fff'ffff'ffff'ffffu) > 0x7ff0'0000'0000'0000u;
    else return false;
}

/// Equal bits, or both NaN: where the processor computes, either operand's may come out.
template <class T>
bool agrees(T a, T b) {
    return bits_of(a) == bits_of(b) || (is_nan(a) && is_nan(b));
}

#if GRADSYNC_X86_DISPATCH
/// Flush-to-zero and denormals-are-zero, as -ffast-math programs and some math libraries set them.
struct FlushToZero {
    unsigned saved = __builtin_ia32_stmxcsr();
    FlushToZero() { __builtin_ia32_ldmxcsr(saved | 0x8040u); }
    ~FlushToZero() { __builtin_ia32_ldmxcsr(saved); }
};
#endif

inline constexpr gradsync::kernel::Isa all_isas[] = {gradsync::kernel::Isa::baseline, gradsync::kernel::Isa::avx2,
                                                     gradsync::kernel::Isa::avx512};

/// Runs the copy of a kernel that is compiled for `isa`; false where this processor lacks it.
template <class Kernel, class... Args>
bool run_with(gradsync::kernel::Isa isa, Args... args) {
    using namespace gradsync::kernel;
    if (isa > gradsync::kernel::isa()) return false;
#if GRADSYNC_X86_DISPATCH
    if (isa == Isa::avx512) return run_avx512<Kernel>(args...), true;
    if (isa == Isa::avx2) return run_avx2<Kernel>(args...), true;
#endif
    return run_baseline<Kernel>(args...), true;
}

}  // namespace gradsync_test
