// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/dtype.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

namespace gs = gradsync;
using gs::DType;

// By size and sign, not by name: `long` and `long long` are one element type.
static_assert(gs::dtype_of<float> == DType::f32 && gs::dtype_of<double> == DType::f64);
static_assert(gs::dtype_of<gs::Float16> == DType::f16 && gs::dtype_of<gs::BFloat16> == DType::bf16);
static_assert(gs::dtype_of<gs::Float8E4M3> == DType::f8e4m3 && gs::dtype_of<const gs::Float8E5M2> == DType::f8e5m2);
static_assert(gs::dtype_of<std::int8_t> == DType::i8 && gs::dtype_of<unsigned char> == DType::u8);
static_assert(gs::dtype_of<int> == DType::i32 && gs::dtype_of<unsigned> == DType::u32);
static_assert(gs::dtype_of<std::int64_t> == DType::i64 && gs::dtype_of<long long> == DType::i64);
static_assert(gs::dtype_of<std::size_t> == DType::u64 && gs::dtype_of<unsigned long long> == DType::u64);
static_assert(gs::dtype_of<const float> == DType::f32);
static_assert(!gs::Element<bool> && !gs::Element<short> && !gs::Element<long double> && !gs::Element<std::byte>);
static_assert(!gs::Element<float*> && !gs::Element<std::string>);

template <class T>
constexpr bool size_agrees = gs::size_of(gs::dtype_of<T>) == sizeof(T);
static_assert(size_agrees<std::int8_t> && size_agrees<std::uint8_t> && size_agrees<std::int32_t> && size_agrees<std::uint32_t> &&
              size_agrees<std::int64_t> && size_agrees<std::uint64_t> && size_agrees<gs::Float16> && size_agrees<gs::BFloat16> &&
              size_agrees<float> && size_agrees<double> && size_agrees<gs::Float8E4M3> && size_agrees<gs::Float8E5M2>);

TEST_CASE("DType: names are distinct, and say kind and bits") {
    std::set<std::string> names;
    for (std::size_t i = 0; i < gs::dtype_count; ++i) {
        const auto dtype = static_cast<DType>(i);
        const std::string name(gs::name_of(dtype));
        names.insert(name);
        const auto digits = name.find_first_of("0123456789");
        REQUIRE(digits != std::string::npos);
        CHECK(std::stoul(name.substr(digits)) == 8 * gs::size_of(dtype));
        CHECK(gs::is_floating(dtype) == (name[0] == 'f' || name[0] == 'b'));
    }
    CHECK(names.size() == gs::dtype_count);
}

TEST_CASE("DType: types of 16 and 8 bits accumulate in f32, all others in themselves") {
    for (std::size_t i = 0; i < gs::dtype_count; ++i) {
        const auto dtype = static_cast<DType>(i);
        const bool low = dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f8e4m3 || dtype == DType::f8e5m2;
        CHECK(gs::is_low_precision(dtype) == low);
        CHECK(gs::accumulator_of(dtype) == (low ? DType::f32 : dtype));
    }
}
