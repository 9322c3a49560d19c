// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "enums.hpp"
#include "storage_floats.hpp"
#include "text.hpp"

namespace gradsync::inline v0_2 {

inline constexpr std::size_t dtype_count = 12;

namespace detail {

/// Not a local of `size_of`: every call would put it on the stack.
inline constexpr std::uint8_t dtype_sizes[dtype_count] = {1, 1, 4, 4, 8, 8, 2, 2, 4, 8, 1, 1};

}  // namespace detail

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) noexcept { return detail::dtype_sizes[static_cast<std::size_t>(dtype)]; }

/// "f32", "bf16", ...
constexpr std::string_view name_of(DType dtype) noexcept {
    return detail::name_in({"i8", "u8", "i32", "u32", "i64", "u64", "f16", "bf16", "f32", "f64", "f8e4m3", "f8e5m2"}, dtype);
}

constexpr bool is_floating(DType dtype) noexcept { return dtype >= DType::f16; }

/// Eight-bit floating types.
constexpr bool is_float8(DType dtype) noexcept { return dtype >= DType::f8e4m3; }

/// Sixteen- and eight-bit floating types: they are summed in f32 and rounded once.
constexpr bool is_low_precision(DType dtype) noexcept { return dtype == DType::f16 || dtype == DType::bf16 || is_float8(dtype); }

/// The type in which elements of `dtype` are summed and scaled.
constexpr DType accumulator_of(DType dtype) noexcept { return is_low_precision(dtype) ? DType::f32 : dtype; }

/// Maps an element type of another library, such as its half, to the DType with the same bits. Specialise it with
/// `static constexpr DType value`.
template <class T>
struct dtype_traits {};

namespace detail {

template <class T>
constexpr int dtype_index() noexcept {
    if constexpr (std::is_same_v<T, Float16>) return static_cast<int>(DType::f16);
    else if constexpr (std::is_same_v<T, BFloat16>) return static_cast<int>(DType::bf16);
    else if constexpr (std::is_same_v<T, float>) return static_cast<int>(DType::f32);
    else if constexpr (std::is_same_v<T, double>) return static_cast<int>(DType::f64);
    else if constexpr (std::is_same_v<T, Float8E4M3>) return static_cast<int>(DType::f8e4m3);
    else if constexpr (std::is_same_v<T, Float8E5M2>) return static_cast<int>(DType::f8e5m2);
    else if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
        // By size and sign, so that `long` and `long long` are both i64.
        constexpr bool s = std::is_signed_v<T>;
        if constexpr (sizeof(T) == 1) return static_cast<int>(s ? DType::i8 : DType::u8);
        else if constexpr (sizeof(T) == 4) return static_cast<int>(s ? DType::i32 : DType::u32);
        else if constexpr (sizeof(T) == 8) return static_cast<int>(s ? DType::i64 : DType::u64);
        else return -1;
    } else if constexpr (requires { dtype_traits<T>::value; }) {
        static_assert(sizeof(T) == size_of(dtype_traits<T>::value), "gradsync: dtype_traits: name a DType of this type's size");
        return static_cast<int>(dtype_traits<T>::value);
    } else return -1;
}

}  // namespace detail

/// An element type of the library: `float`, `double`, `Float16`, `BFloat16`, `Float8E4M3`, `Float8E5M2`, an integer of 1, 4 or 8
/// bytes, or a type with `dtype_traits`.
template <class T>
concept Element = detail::dtype_index<std::remove_cv_t<T>>() >= 0;

/// The `DType` of an element type.
template <Element T>
inline constexpr DType dtype_of = static_cast<DType>(detail::dtype_index<std::remove_cv_t<T>>());

}  // namespace gradsync::inline v0_2
