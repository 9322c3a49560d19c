// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "enums.hpp"
#include "storage_floats.hpp"
#include "text.hpp"

// The floating types of CUDA, libtorch and Eigen are elements. Core includes none of these libraries:
// declarations are enough.
struct __half;
struct __nv_bfloat16;
struct __nv_fp8_e4m3;
struct __nv_fp8_e5m2;
namespace c10 {
struct Half;
struct BFloat16;
struct Float8_e4m3fn;
struct Float8_e5m2;
}  // namespace c10
namespace Eigen {
struct half;
struct bfloat16;
}  // namespace Eigen

namespace gradsync::inline v0_2 {

inline constexpr std::size_t dtype_count = 12;  ///< Internal: the number of element types.

namespace detail {

/// Not a local of `size_of`: every call would put it on the stack.
inline constexpr std::uint8_t dtype_sizes[dtype_count] = {1, 1, 4, 4, 8, 8, 2, 2, 4, 8, 1, 1};

}  // namespace detail

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) noexcept { return detail::dtype_sizes[static_cast<std::size_t>(dtype)]; }

/// "f32", "bf16", ...
constexpr std::string_view name_of(DType dtype) noexcept {
    return detail::name_in({"i8", "u8", "i32", "u32", "i64", "u64", "f16", "bf16", "f32", "f64", "f8e4m3", "f8e5m2"},
                           dtype);
}

constexpr bool is_floating(DType dtype) noexcept { return dtype >= DType::f16; }  ///< Floating types, of any width.

/// Eight-bit floating types.
constexpr bool is_float8(DType dtype) noexcept { return dtype >= DType::f8e4m3; }

/// Sixteen- and eight-bit floating types: they are summed in f32 and rounded once.
constexpr bool is_low_precision(DType dtype) noexcept {
    return dtype == DType::f16 || dtype == DType::bf16 || is_float8(dtype);
}

/// The type in which elements of `dtype` are summed and scaled.
constexpr DType accumulator_of(DType dtype) noexcept { return is_low_precision(dtype) ? DType::f32 : dtype; }

namespace detail {

struct NoDType {};

}  // namespace detail

/// Maps an element type of your own to the DType with the same bits. Specialise it with `static constexpr DType value`.
/// The types that `Element` lists need none.
template <class T>
struct dtype_traits : detail::NoDType {};

namespace detail {

// The compiler's own types. std::float16_t and std::bfloat16_t are the same types.
// Clang 14 has the macro without the type.
#if defined(__FLT16_MANT_DIG__) && (!defined(__clang__) || __clang_major__ >= 15)
using CompilerFloat16 = _Float16;
#else
using CompilerFloat16 = Float16;
#endif
#if defined(__BFLT16_MANT_DIG__) || (defined(__clang__) && __clang_major__ >= 17)  // clang has no macro
using CompilerBFloat16 = __bf16;
#else
using CompilerBFloat16 = BFloat16;
#endif

template <class T, class... Types>
inline constexpr bool is_one_of = (std::is_same_v<T, Types> || ...);

template <class T>
constexpr int dtype_index() noexcept {
    if constexpr (is_one_of<T, Float16, CompilerFloat16, ::__half, ::c10::Half, ::Eigen::half>)
        return static_cast<int>(DType::f16);
    else if constexpr (is_one_of<T, BFloat16, CompilerBFloat16, ::__nv_bfloat16, ::c10::BFloat16, ::Eigen::bfloat16>)
        return static_cast<int>(DType::bf16);
    else if constexpr (std::is_same_v<T, float>) return static_cast<int>(DType::f32);
    else if constexpr (std::is_same_v<T, double>) return static_cast<int>(DType::f64);
    else if constexpr (is_one_of<T, Float8E4M3, ::__nv_fp8_e4m3, ::c10::Float8_e4m3fn>)
        return static_cast<int>(DType::f8e4m3);
    else if constexpr (is_one_of<T, Float8E5M2, ::__nv_fp8_e5m2, ::c10::Float8_e5m2>)
        return static_cast<int>(DType::f8e5m2);
    else if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
        // By size and sign, so that `long` and `long long` are both i64.
        constexpr bool s = std::is_signed_v<T>;
        if constexpr (sizeof(T) == 1) return static_cast<int>(s ? DType::i8 : DType::u8);
        else if constexpr (sizeof(T) == 4) return static_cast<int>(s ? DType::i32 : DType::u32);
        else if constexpr (sizeof(T) == 8) return static_cast<int>(s ? DType::i64 : DType::u64);
        else return -1;
    } else if constexpr (!std::is_base_of_v<NoDType, dtype_traits<T>>) {
        constexpr bool complete = requires { typename std::integral_constant<DType, dtype_traits<T>::value>; };
        static_assert(
            complete,
            "gradsync: dtype_traits: give the specialisation for this type a member static constexpr DType value");
        if constexpr (complete) {
            static_assert(sizeof(T) == size_of(dtype_traits<T>::value),
                          "gradsync: dtype_traits: name a DType of this type's size");
            return static_cast<int>(dtype_traits<T>::value);
        } else return 0;
    } else return -1;
}

}  // namespace detail

/// An element type:
/// - `float`, `double`, `Float16`, `BFloat16`, `Float8E4M3`, `Float8E5M2`, an integer of 1, 4 or 8 bytes;
/// - `_Float16` (`std::float16_t`) and `__bf16` (`std::bfloat16_t`), if the compiler has them
///   (g++ 12 and 13, clang 15 and 17);
/// - CUDA's `__half`, `__nv_bfloat16`, `__nv_fp8_e4m3`, `__nv_fp8_e5m2`; libtorch's `at::Half`, `at::BFloat16`,
///   `at::Float8_e4m3fn`, `at::Float8_e5m2`; Eigen's `half`, `bfloat16`;
/// - a type with `dtype_traits`.
template <class T>
concept Element = detail::dtype_index<std::remove_cv_t<T>>() >= 0;

/// The `DType` of an element type.
template <Element T>
inline constexpr DType dtype_of = static_cast<DType>(detail::dtype_index<std::remove_cv_t<T>>());

}  // namespace gradsync::inline v0_2
