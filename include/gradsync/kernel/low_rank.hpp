// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/math.hpp"
#include "elementwise.hpp"
#include "largest.hpp"

/// @file
/// Products of a matrix and a few vectors, in f32. Matrices have m rows and n columns, row by row in memory. The r
/// vectors of a side are consecutive in memory: `left` has r of m elements, `right` has r of n. Products are rounded
/// before they are added, and added in an order that does not depend on the vector width. The bits are therefore the
/// same on every processor: ranks that repeat a computation need the same result.

namespace gradsync::inline v0_2::kernel {

namespace detail {

inline constexpr std::size_t dot_block = 64;

struct Dot {
    GRADSYNC_ALWAYS_INLINE static void run(const float* a, const float* b, std::size_t count, float* result) {
        alignas(64) float sums[dot_block] = {};
        std::size_t first = 0;
        for (; first + dot_block <= count; first += dot_block) {
            alignas(64) float products[dot_block];
            for (std::size_t i = 0; i < dot_block; ++i) products[i] = a[first + i] * b[first + i];
            round_now(products);
            for (std::size_t i = 0; i < dot_block; ++i) sums[i] += products[i];
        }
        for (std::size_t i = 0; first + i < count; ++i) {
            float product = a[first + i] * b[first + i];
            round_now(product);
            sums[i] += product;
        }
        for (std::size_t half = dot_block / 2; half != 0; half /= 2)
            for (std::size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
        *result = sums[0];
    }
};

/// to += factor * x
struct AddMultiple {
    GRADSYNC_ALWAYS_INLINE static void run(float* __restrict to, float factor, const float* __restrict x,
                                           std::size_t count) {
        std::size_t first = 0;
        for (; first + dot_block <= count; first += dot_block) {
            alignas(64) float products[dot_block];
            for (std::size_t i = 0; i < dot_block; ++i) products[i] = factor * x[first + i];
            round_now(products);
            for (std::size_t i = 0; i < dot_block; ++i) to[first + i] += products[i];
        }
        for (; first < count; ++first) {
            float product = factor * x[first];
            round_now(product);
            to[first] += product;
        }
    }
};

struct TimesRight {
    GRADSYNC_ALWAYS_INLINE static void run(const float* matrix, std::size_t m, std::size_t n, const float* right,
                                           std::size_t r, float* left) {
        for (std::size_t i = 0; i < m; ++i)
            for (std::size_t c = 0; c < r; ++c) Dot::run(matrix + i * n, right + c * n, n, left + c * m + i);
    }
};
struct LeftTimes {
    GRADSYNC_ALWAYS_INLINE static void run(const float* matrix, std::size_t m, std::size_t n, const float* left,
                                           std::size_t r, float* right) {
        for (std::size_t j = 0; j < r * n; ++j) right[j] = 0;
        for (std::size_t i = 0; i < m; ++i)
            for (std::size_t c = 0; c < r; ++c) AddMultiple::run(right + c * n, left[c * m + i], matrix + i * n, n);
    }
};
struct AddProduct {
    GRADSYNC_ALWAYS_INLINE static void run(float* matrix, std::size_t m, std::size_t n, const float* left,
                                           const float* right, std::size_t r, float sign) {
        for (std::size_t i = 0; i < m; ++i)
            for (std::size_t c = 0; c < r; ++c)
                AddMultiple::run(matrix + i * n, sign * left[c * m + i], right + c * n, n);
    }
};

}  // namespace detail

/// left[c] = matrix * right[c]
inline void times_right(const float* matrix, std::size_t m, std::size_t n, const float* right, std::size_t r,
                        float* left) {
    dispatch<detail::TimesRight>(matrix, m, n, right, r, left);
}
/// right[c] = matrix^T * left[c]
inline void left_times(const float* matrix, std::size_t m, std::size_t n, const float* left, std::size_t r,
                       float* right) {
    dispatch<detail::LeftTimes>(matrix, m, n, left, r, right);
}
/// matrix += sign * (sum over c of left[c] * right[c]^T)
inline void add_product(float* matrix, std::size_t m, std::size_t n, const float* left, const float* right,
                        std::size_t r, float sign = 1) {
    dispatch<detail::AddProduct>(matrix, m, n, left, right, r, sign);
}
inline float dot(const float* a, const float* b, std::size_t count) {
    float result;
    dispatch<detail::Dot>(a, b, count, &result);
    return result;
}

/// Makes the r vectors of `count` elements orthonormal in place, one after the other (Gram-Schmidt). A vector within
/// the span of the earlier ones, up to rounding, becomes zero. Returns false if an element is not finite; the vectors
/// are then unspecified.
inline bool orthonormalise(float* vectors, std::size_t count, std::size_t r) {
    constexpr float rounding = 1e-10f;  // for squares
    constexpr float smallest = 1e-37f;  // its inverse is finite
    for (std::size_t c = 0; c < r; ++c) {
        float* const own = vectors + c * count;
        // The largest element becomes 1 first, so that squares neither vanish nor overflow.
        const float largest = largest_magnitude(own, count);
        if (!gradsync::detail::is_finite(largest)) return false;
        if (largest < smallest) {
            scale({own, count}, 0);
            continue;
        }
        scale({own, count}, 1 / static_cast<double>(largest));
        const float before = dot(own, own, count);
        for (int turn = 0; turn < 2; ++turn)  // the second turn removes the rounding errors of the first
            for (std::size_t d = 0; d < c; ++d) {
                const float* const other = vectors + d * count;
                dispatch<detail::AddMultiple>(own, -dot(own, other, count), other, count);
            }
        const float after = dot(own, own, count);
        const bool within = after <= rounding * before;
        scale({own, count}, within ? 0 : 1 / gradsync::detail::square_root(static_cast<double>(after)));
    }
    return true;
}

}  // namespace gradsync::inline v0_2::kernel
