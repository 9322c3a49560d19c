// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
// The kernels in a program whose own flags allow what the library does not want: NaNs stay, sums keep their order.
// ctest: COMPILE_OPTIONS -ffast-math
#include <gradsync/kernel/elementwise.hpp>
#include <gradsync/kernel/reduce.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "kernel_test.hpp"

namespace gs = gradsync;
namespace kernel = gradsync::kernel;
using namespace gradsync_test;

namespace {

template <class T>
constexpr std::uint64_t quiet_nan = [] {
    if constexpr (sizeof(T) == 1) return std::uint64_t{T::quiet_nan};
    else if constexpr (std::is_same_v<T, double>) return std::uint64_t{0x7ff8'0000'0000'0000u};
    else if constexpr (std::is_same_v<T, float>) return std::uint64_t{0x7fc0'0000u};
    else return std::uint64_t{std::is_same_v<T, gs::BFloat16> ? 0x7fc0u : 0x7e00u};
}();

template <class T>
T element(float value) {
    return T(value);
}

constexpr std::size_t count = 300;

}  // namespace

TEST_CASE_TEMPLATE("fast-math: in min and max a NaN wins", T, gs::Float16, gs::BFloat16, float, double, gs::Float8E4M3, gs::Float8E5M2) {
    for (const gs::ReduceOp op : {gs::ReduceOp::min, gs::ReduceOp::max}) {
        std::vector<T> a(count, element<T>(1)), b(count, element<T>(2)), result(count);
        for (std::size_t i = 0; i < count; i += 3) a[i] = from_bits<T>(quiet_nan<T>);
        for (std::size_t i = 0; i < count; i += 5) b[i] = from_bits<T>(quiet_nan<T>);
        const void* const inputs[] = {a.data(), b.data()};
        void* const outputs[] = {result.data()};
        kernel::Reduction reduction;
        reduction.inputs = inputs;
        reduction.outputs = outputs;
        reduction.count = count;
        reduction.dtype = gs::dtype_of<T>;
        reduction.op = op;
        kernel::register_kernels<gs::dtype_of<T>>();
        kernel::reduce(reduction);
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < count; ++i) {
            const bool nan = i % 3 == 0 || i % 5 == 0;
            wrong += bits_of(result[i]) != (nan ? quiet_nan<T> : bits_of(element<T>(op == gs::ReduceOp::min ? 1 : 2)));
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE_TEMPLATE("fast-math: clamp leaves a NaN", T, gs::Float16, gs::BFloat16, float, double, gs::Float8E4M3, gs::Float8E5M2) {
    std::vector<T> data(count, element<T>(-3));
    for (std::size_t i = 0; i < count; i += 7) data[i] = from_bits<T>(quiet_nan<T>);
    kernel::clamp(gs::buffer(data), 2);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) wrong += bits_of(data[i]) != (i % 7 == 0 ? quiet_nan<T> : bits_of(element<T>(-2)));
    CHECK(wrong == 0);
}

TEST_CASE("fast-math: sums keep their order") {
    std::vector<double> data(count);
    volatile double sums[kernel::detail::square_sums] = {};
    for (std::size_t i = 0; i < count; ++i) {
        data[i] = 1 / (3 + static_cast<double>(i));
        volatile double& sum = sums[i % kernel::detail::square_sums];
        const volatile double square = data[i] * data[i];
        sum = sum + square;
    }
    volatile double expected = 0;
    for (volatile double& sum : sums) expected = expected + sum;
    const double seen = expected;
    CHECK(bits_of(kernel::sum_of_squares(gs::const_buffer(data))) == bits_of(seen));
}
