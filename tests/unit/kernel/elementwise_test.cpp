// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/kernel/elementwise.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernel_test.hpp"

namespace gs = gradsync;
namespace kernel = gradsync::kernel;
using kernel::Isa;
using namespace gradsync_test;

namespace {

template <class T>
int count_different(const std::vector<T>& a, const std::vector<T>& b) {
    int different = 0;
    for (std::size_t i = 0; i < a.size(); ++i) different += !agrees(a[i], b[i]);
    return different;
}

/// A double as an element: halves by way of float, rounded twice, which does no harm to what is but a test value.
template <class T>
T element(double value) {
    if constexpr (is_half<T>) return T(static_cast<float>(value));
    else return static_cast<T>(value);
}

/// Uneven numbers of both signs and several magnitudes, with special ones among them.
template <class T>
std::vector<T> some_values(std::size_t count, int seed = 0) {
    using limits = std::numeric_limits<double>;
    const double special[] = {0.0, -0.0, limits::infinity(), -limits::infinity(), limits::quiet_NaN(), 6e-8, -1e-40, 65504, 1.0, -1.0};
    std::vector<T> values;
    for (std::size_t i = 0; i < count; ++i) {
        const double x = std::sin(static_cast<double>(i) * 1.7 + seed) * std::ldexp(1.0, static_cast<int>(i % 9) - 4);
        values.push_back(element<T>(i % 13 == 5 ? special[(i / 13 + static_cast<std::size_t>(seed)) % 10] : x));
    }
    return values;
}

template <class T>
std::vector<T> finite_values(std::size_t count) {
    auto values = some_values<T>(count);
    for (T& value : values)
        if (!std::isfinite(static_cast<double>(widened(value)))) value = element<T>(0.3);
    return values;
}

constexpr std::size_t counts[] = {0, 1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000, 1024, 1025, 2500};
constexpr std::size_t offsets[] = {0, 1, 3};  // elements

/// Runs `change` on the middle part of a buffer, and expects `expected(i)` there and nothing new around it.
template <class T, class Change, class Expected>
void check(std::size_t count, std::size_t offset, Change change, Expected expected) {
    std::vector<T> data = some_values<T>(count + offset + 9), wanted = data;
    for (std::size_t i = offset; i < offset + count; ++i) wanted[i] = expected(wanted[i], i - offset);
    change(gs::buffer(data).subview(offset, count));
    CHECK_MESSAGE(count_different(data, wanted) == 0, "count ", count, ", offset ", offset);
}

}  // namespace

TEST_CASE_TEMPLATE("scale takes every length and misalignment", T, gs::Float16, gs::BFloat16, float, double, gs::Float8E4M3,
                   gs::Float8E5M2) {
    for (const std::size_t count : counts)
        for (const std::size_t offset : offsets)
            for (const double factor : {0.1, -1.0, 0.0})
                check<T>(
                    count, offset, [&](gs::BufferView view) { kernel::scale(view, factor); },
                    [&](T x, std::size_t) { return T(widened(x) * static_cast<kernel::accumulator_t<T>>(factor)); });
}

TEST_CASE_TEMPLATE("clamp takes every length and misalignment, and a NaN stays", T, gs::Float16, gs::BFloat16, float, double,
                   gs::Float8E4M3, gs::Float8E5M2) {
    for (const std::size_t count : counts)
        for (const std::size_t offset : offsets)
            for (const double limit : {0.7, 0.0})
                check<T>(
                    count, offset, [&](gs::BufferView view) { kernel::clamp(view, limit); },
                    [&](T x, std::size_t) {
                        const auto bound = static_cast<kernel::accumulator_t<T>>(limit);
                        const auto value = widened(x);
                        return value > bound ? T(bound) : value < -bound ? T(-bound) : x;
                    });
}

TEST_CASE_TEMPLATE("add takes every pair of types, length and misalignment", T, gs::Float16, gs::BFloat16, float, double, gs::Float8E4M3,
                   gs::Float8E5M2) {
    const auto add_from = [&]<class From>(From) {
        for (const std::size_t count : counts)
            for (const std::size_t offset : offsets) {
                const auto from = some_values<From>(count + 2, 3);
                check<T>(
                    count, offset, [&](gs::BufferView view) { kernel::add(view, gs::const_buffer(from).subview(2, count)); },
                    [&](T x, std::size_t i) { return T(widened(x) + static_cast<kernel::accumulator_t<T>>(widened(from[i + 2]))); });
            }
    };
    add_from(gs::Float16{});
    add_from(gs::BFloat16{});
    add_from(float{});
    add_from(double{});
    add_from(gs::Float8E5M2{});
}

TEST_CASE_TEMPLATE("sum_of_squares adds up in sixteen sums, in turns", T, gs::Float16, gs::BFloat16, float, double, gs::Float8E4M3,
                   gs::Float8E5M2) {
    for (const std::size_t count : counts)
        for (const std::size_t offset : offsets) {
            const auto values = finite_values<T>(count + offset);
            double sums[16] = {}, expected = 0;
            for (std::size_t i = 0; i < count; ++i) {
                const auto x = static_cast<double>(widened(values[i + offset]));
                const volatile double square = x * x;  // not fused with the sum
                sums[i % 16] += square;
            }
            for (const double sum : sums) expected += sum;
            CHECK(kernel::sum_of_squares(gs::const_buffer(values).subview(offset, count)) == expected);
        }
    auto values = finite_values<T>(100);
    values[77] = element<T>(std::numeric_limits<double>::quiet_NaN());
    CHECK(std::isnan(kernel::sum_of_squares(gs::const_buffer(values))));
}

TEST_CASE_TEMPLATE("elementwise kernels give the same bits on every instruction set", A, float, double) {
    for (const std::size_t count : counts) {
        const auto values = some_values<A>(count), others = some_values<A>(count, 3);
        std::vector<A> ordinary;  // whose squares matter in the sums to the last bit
        for (std::size_t i = 0; i < count; ++i) ordinary.push_back(static_cast<A>(1.5 + std::sin(static_cast<double>(i))));
        std::vector<A> scaled, clamped, sum;
        std::vector<double> squares;
        for (const Isa isa : all_isas) {
            auto own_scaled = values, own_clamped = values, own_sum = values;
            std::vector<double> own_squares(kernel::detail::square_sums);
            if (!run_with<kernel::detail::InPlace<kernel::detail::Product>>(isa, own_scaled.data(), count, 0.1)) continue;
            run_with<kernel::detail::InPlace<kernel::detail::Clamp>>(isa, own_clamped.data(), count, 0.3);
            run_with<kernel::detail::Add>(isa, own_sum.data(), others.data(), count);
            run_with<kernel::detail::SumOfSquares>(isa, static_cast<const A*>(ordinary.data()), count, own_squares.data());
            if (isa == Isa::baseline) {
                scaled = own_scaled;
                clamped = own_clamped;
                sum = own_sum;
                squares = own_squares;
            }
            CHECK(count_different(own_scaled, scaled) == 0);
            CHECK(count_different(own_clamped, clamped) == 0);
            CHECK(count_different(own_sum, sum) == 0);
            CHECK(own_squares == squares);
        }
    }
}
