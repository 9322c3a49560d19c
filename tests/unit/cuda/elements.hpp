// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>

#include <gradsync/core/dtype.hpp>

#include "conformance/backend/oracle.hpp"

/// What the tests of device passes and of their kernels compare: elements of every floating type.

namespace gradsync_test {

using gradsync::DType;

inline constexpr DType floating[] = {DType::f16, DType::bf16, DType::f32, DType::f64, DType::f8e4m3, DType::f8e5m2};

/// Random elements with some that are special; of 8-bit types all codes.
inline Bytes elements_of(DType dtype, std::size_t count, std::uint64_t seed) {
    Bytes bytes = random_elements(dtype, count, seed);
    with_element_type(dtype, [&]<class T>(T) {
        T* const elements = reinterpret_cast<T*>(bytes.data());
        if constexpr (gradsync::is_float8(gradsync::dtype_of<T>)) {
            for (std::size_t i = 0; i < count; ++i) elements[i] = T::from_bits(static_cast<std::uint8_t>(i + seed));
        } else if constexpr (!std::is_integral_v<T>) {
            const float special[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-30f, 65504.0f, 3e38f, 0x1p-17f, 0x1.8p-16f, 6e-8f, 464, 465};
            for (std::size_t i = 0; i < std::size(special) && 3 * i < count; ++i) elements[3 * i] = T(special[i]);
        }
    });
    return bytes;
}

/// Equal bits; a NaN is as good as another.
inline bool same(DType dtype, const Bytes& a, const Bytes& b) {
    if (a == b) return true;
    bool equal = a.size() == b.size();
    with_element_type(dtype, [&]<class T>(T) {
        if constexpr (!std::is_integral_v<T>)
            for (std::size_t i = 0; equal && i < a.size() / sizeof(T); ++i) {
                const T x = reinterpret_cast<const T*>(a.data())[i], y = reinterpret_cast<const T*>(b.data())[i];
                using A = std::conditional_t<gradsync::is_low_precision(gradsync::dtype_of<T>), float, T>;
                equal = std::memcmp(&x, &y, sizeof x) == 0 || (std::isnan(static_cast<A>(x)) && std::isnan(static_cast<A>(y)));
            }
    });
    return equal;
}

}  // namespace gradsync_test
