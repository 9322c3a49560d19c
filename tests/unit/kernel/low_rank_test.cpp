// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/kernel/low_rank.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "kernel_test.hpp"
#include "support/random.hpp"

namespace kernel = gradsync::kernel;
using gradsync_test::Random;
using kernel::Isa;

namespace {

using Floats = std::vector<float>;

/// Of both signs and several magnitudes.
Floats uneven(std::size_t count, std::uint64_t seed) {
    Random random(seed);
    Floats result(count);
    for (float& x : result)
        x = static_cast<float>(std::ldexp(static_cast<double>(random() % 2001) - 1000, -10 - static_cast<int>(random.below(4))));
    return result;
}

struct Size {
    std::size_t rows, columns, rank;
};
std::vector<Size> sizes() {
    std::vector<Size> result;
    for (const std::size_t rows : {1u, 2u, 7u, 31u, 64u, 65u, 130u})
        for (const std::size_t columns : {1u, 3u, 16u, 63u, 64u, 65u, 127u, 128u, 129u, 130u})
            for (const std::size_t rank : {1u, 2u, 3u, 4u}) result.push_back({rows, columns, rank});
    return result;
}

/// Is `actual` within rounding of sums of so many terms, of which `magnitude` is the sum of magnitudes?
bool is_close(float actual, double expected, double magnitude) {
    return std::abs(static_cast<double>(actual) - expected) <= 1e-6 * magnitude + 1e-30;
}

/// What a kernel makes of `result` on one instruction set; empty where this processor lacks it.
template <class Kernel, class... Args>
Floats result_on(Isa isa, Floats result, Args... args) {
    if constexpr (std::is_same_v<Kernel, kernel::detail::AddProduct>) {
        if (!gradsync_test::run_with<Kernel>(isa, result.data(), args...)) result.clear();
    } else {
        if (!gradsync_test::run_with<Kernel>(isa, args..., result.data())) result.clear();
    }
    return result;
}

/// Vectors of which those that are not zero have length 1 and are at right angles: the first thing that is wrong, or "".
std::string wrong_base(const Floats& vectors, std::size_t count, std::size_t rank, std::size_t zeros) {
    std::size_t zeros_found = 0;
    for (std::size_t c = 0; c < rank; ++c) {
        for (std::size_t d = 0; d <= c; ++d) {
            double product = 0;
            for (std::size_t i = 0; i < count; ++i)
                product += static_cast<double>(vectors[c * count + i]) * static_cast<double>(vectors[d * count + i]);
            if (c == d && product == 0) ++zeros_found;
            else if (std::abs(product - (c == d ? 1 : 0)) > 1e-5)
                return std::to_string(c) + " times " + std::to_string(d) + " is " + std::to_string(product);
        }
    }
    return zeros_found == zeros ? "" : std::to_string(zeros_found) + " vectors are zero";
}

}  // namespace

TEST_CASE("low rank: products agree with plain loops") {
    for (const Size size : sizes()) {
        const std::size_t m = size.rows, n = size.columns, r = size.rank;
        const Floats matrix = uneven(m * n, 1), left = uneven(r * m, 2), right = uneven(r * n, 3);
        Floats of_right(r * m, 17), of_left(r * n, 17), sum = matrix, difference = matrix;
        kernel::times_right(matrix.data(), m, n, right.data(), r, of_right.data());
        kernel::left_times(matrix.data(), m, n, left.data(), r, of_left.data());
        kernel::add_product(sum.data(), m, n, left.data(), right.data(), r);
        kernel::add_product(difference.data(), m, n, left.data(), right.data(), r, -1);
        std::size_t wrong = 0;
        const auto sum_over = [&](std::size_t count, auto term, float actual, double start = 0) {
            double expected = start, magnitude = std::abs(start);
            for (std::size_t k = 0; k < count; ++k) {
                expected += term(k);
                magnitude += std::abs(term(k));
            }
            if (!is_close(actual, expected, magnitude)) ++wrong;
        };
        const auto at = [](const Floats& x, std::size_t k) { return static_cast<double>(x[k]); };
        for (std::size_t c = 0; c < r; ++c) {
            for (std::size_t i = 0; i < m; ++i)
                sum_over(
                    n, [&](std::size_t j) { return at(matrix, i * n + j) * at(right, c * n + j); }, of_right[c * m + i]);
            for (std::size_t j = 0; j < n; ++j)
                sum_over(
                    m, [&](std::size_t i) { return at(matrix, i * n + j) * at(left, c * m + i); }, of_left[c * n + j]);
        }
        for (std::size_t i = 0; i < m; ++i)
            for (std::size_t j = 0; j < n; ++j) {
                sum_over(
                    r, [&](std::size_t c) { return at(left, c * m + i) * at(right, c * n + j); }, sum[i * n + j], at(matrix, i * n + j));
                sum_over(
                    r, [&](std::size_t c) { return -at(left, c * m + i) * at(right, c * n + j); }, difference[i * n + j],
                    at(matrix, i * n + j));
            }
        CHECK_MESSAGE(wrong == 0, m, " x ", n, ", rank ", r);
    }
}

TEST_CASE("low rank: dot products of every length are right") {
    for (std::size_t count = 0; count <= 200; ++count) {
        const Floats a = uneven(count, 4), b = uneven(count, 5);
        double expected = 0, magnitude = 0;
        for (std::size_t i = 0; i < count; ++i) {
            expected += static_cast<double>(a[i]) * static_cast<double>(b[i]);
            magnitude += std::abs(static_cast<double>(a[i]) * static_cast<double>(b[i]));
        }
        CHECK(is_close(kernel::dot(a.data(), b.data(), count), expected, magnitude));
    }
}

TEST_CASE("low rank: kernels give the same bits on every instruction set") {
    using namespace kernel::detail;
    for (const Size size : sizes()) {
        const std::size_t m = size.rows, n = size.columns, r = size.rank;
        const Floats matrix = uneven(m * n, 6), left = uneven(r * m, 7), right = uneven(r * n, 8);
        const auto all_of = [&](Isa isa) {
            std::vector<Floats> all;
            all.push_back(result_on<TimesRight>(isa, Floats(r * m), matrix.data(), m, n, right.data(), r));
            all.push_back(result_on<LeftTimes>(isa, Floats(r * n), matrix.data(), m, n, left.data(), r));
            all.push_back(result_on<AddProduct>(isa, matrix, m, n, left.data(), right.data(), r, -1.0f));
            all.push_back(result_on<Dot>(isa, Floats(1), matrix.data(), matrix.data(), m * n));
            Floats multiple = right;
            all.push_back(gradsync_test::run_with<AddMultiple>(isa, multiple.data(), 0.3f, matrix.data(), n) ? multiple : Floats());
            return all;
        };
        const auto baseline = all_of(Isa::baseline);
        for (const Isa isa : {Isa::avx2, Isa::avx512})
            if (isa <= kernel::isa()) CHECK_MESSAGE(all_of(isa) == baseline, m, " x ", n, ", rank ", r);
    }
}

TEST_CASE("largest_magnitude is 0 of nothing, and not finite if an element is not") {
    using limits = std::numeric_limits<float>;
    CHECK(kernel::largest_magnitude(nullptr, 0) == 0);
    const Floats numbers{0.5f, -3, 2, -0.0f};
    CHECK(kernel::largest_magnitude(numbers.data(), 4) == 3);
    CHECK(kernel::largest_magnitude(numbers.data() + 3, 1) == 0);
    const Floats small{limits::denorm_min(), -0.0f};
    CHECK(kernel::largest_magnitude(small.data(), 2) == limits::denorm_min());
    for (const float x : {limits::infinity(), -limits::infinity(), limits::quiet_NaN(), -limits::quiet_NaN()}) {
        const Floats some{limits::max(), x, 1};
        CHECK(!std::isfinite(kernel::largest_magnitude(some.data(), 3)));
    }
}

TEST_CASE("orthonormalise takes vectors of all magnitudes") {
    for (const std::size_t count : {4u, 5u, 31u, 64u, 130u, 1000u})
        for (const std::size_t rank : {1u, 2u, 3u, 4u})
            for (const double magnitude : {1e-35, 1e-30, 1e-20, 1.0, 1e20, 1e30, 1e37}) {
                CAPTURE(count);
                CAPTURE(rank);
                CAPTURE(magnitude);
                Floats vectors = uneven(count * rank, count);
                for (std::size_t c = 0; c < rank; ++c)  // each of another magnitude
                    for (std::size_t i = 0; i < count; ++i)
                        vectors[c * count + i] =
                            static_cast<float>(static_cast<double>(vectors[c * count + i]) * (c % 2 == 0 ? magnitude : 1));
                CHECK(kernel::orthonormalise(vectors.data(), count, rank));
                CHECK(wrong_base(vectors, count, rank, 0) == "");
            }
}

TEST_CASE("orthonormalise: the first vector keeps its direction, the others the plane of those before them") {
    const std::size_t count = 50;
    const Floats before = uneven(2 * count, 9);
    Floats after = before;
    REQUIRE(kernel::orthonormalise(after.data(), count, 2));
    const auto dot = [&](const float* a, const float* b) {
        double sum = 0;
        for (std::size_t i = 0; i < count; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
        return sum;
    };
    const double length = std::sqrt(dot(before.data(), before.data()));
    const double along = dot(before.data() + count, after.data()), across = dot(before.data() + count, after.data() + count);
    double wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
        wrong = std::max(wrong, std::abs(static_cast<double>(before[i]) - length * static_cast<double>(after[i])));
        wrong = std::max(wrong, std::abs(static_cast<double>(before[count + i]) - along * static_cast<double>(after[i]) -
                                         across * static_cast<double>(after[count + i])));
    }
    CHECK(wrong < 1e-6);
    CHECK(across > 0);
}

TEST_CASE("orthonormalise: what lies within the span of those before becomes zero") {
    for (const std::size_t count : {3u, 64u, 130u, 1000u}) {
        CAPTURE(count);
        Floats vectors = uneven(2 * count, 10);
        Floats sum(count), zero(count), multiple(count);
        for (std::size_t i = 0; i < count; ++i) {
            sum[i] = 3 * vectors[i] - vectors[count + i];
            multiple[i] = 1e-6f * vectors[count + i];
        }
        vectors.insert(vectors.end(), sum.begin(), sum.end());
        vectors.insert(vectors.end(), zero.begin(), zero.end());
        vectors.insert(vectors.end(), multiple.begin(), multiple.end());
        REQUIRE(kernel::orthonormalise(vectors.data(), count, 5));
        CHECK(wrong_base(vectors, count, 5, 3) == "");
        CHECK(std::all_of(vectors.begin() + static_cast<std::ptrdiff_t>(2 * count), vectors.end(), [](float x) { return x == 0; }));
    }
    // More of them than there are dimensions.
    Floats many = uneven(4 * 2, 11);
    REQUIRE(kernel::orthonormalise(many.data(), 2, 4));
    CHECK(wrong_base(many, 2, 4, 2) == "");
}

TEST_CASE("orthonormalise takes no vectors and no elements, and makes vanishing vectors zero") {
    CHECK(kernel::orthonormalise(nullptr, 5, 0));
    CHECK(kernel::orthonormalise(nullptr, 0, 3));
    Floats tiny(10, std::numeric_limits<float>::denorm_min());
    CHECK(kernel::orthonormalise(tiny.data(), 10, 1));
    CHECK(tiny == Floats(10));
}

TEST_CASE("orthonormalise says if a vector is not finite") {
    for (const float x :
         {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
        for (std::size_t place = 0; place < 3 * 20; ++place) {
            Floats vectors = uneven(3 * 20, 12);
            vectors[place] = x;
            CHECK(!kernel::orthonormalise(vectors.data(), 20, 3));
        }
}
