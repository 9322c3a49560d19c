// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/kernel/convert.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "kernel_test.hpp"
#include "support/half_oracle.hpp"

namespace gs = gradsync;
using gradsync_test::bits_of;
using gradsync_test::HalfOracle;

namespace {

/// What one element converts to: by the scalar types, and by the oracle where they have no such conversion.
template <class To, class From>
To convert_one(From from) {
    if constexpr (std::is_same_v<To, From>) return from;
    else if constexpr (std::is_same_v<From, double> && sizeof(To) == 2)
        return To::from_bits((std::is_same_v<To, gs::Float16> ? HalfOracle::float16() : HalfOracle::bfloat16()).expected(from));
    else if constexpr (sizeof(From) == 2 || sizeof(To) == 2) return static_cast<To>(static_cast<float>(from));
    else return static_cast<To>(from);
}

/// Equal bits; where the processor itself converts (float and double), any NaN equals any other.
template <class From, class To>
bool is_right(To actual, To expected) {
    return bits_of(actual) == bits_of(expected) || (sizeof(From) >= 4 && sizeof(To) >= 4 && gradsync_test::agrees(actual, expected));
}

template <class From, class To>
void check_all(const std::vector<From>& from) {
    std::vector<To> to(from.size());
    const auto check = [&] {
        int wrong = 0;
        for (std::size_t i = 0; i < from.size(); ++i)
            if (!is_right<From>(to[i], convert_one<To>(from[i])) && wrong++ == 0)
                CHECK_MESSAGE(bits_of(to[i]) == bits_of(convert_one<To>(from[i])), "from bits ", bits_of(from[i]));
        CHECK(wrong == 0);
    };
    if constexpr (std::is_same_v<From, float> || std::is_same_v<To, float>)
        for (const gs::kernel::Isa isa : gradsync_test::all_isas)
            if (gradsync_test::run_with<gs::kernel::detail::Convert>(isa, from.data(), to.data(), from.size())) check();
    gradsync_test::convert(from.data(), to.data(), from.size());
    check();
}

template <class Half>
std::vector<Half> all_halves() {
    std::vector<Half> result;
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) result.push_back(Half::from_bits(static_cast<std::uint16_t>(bits)));
    return result;
}

template <class From>
std::vector<From> hard_cases() {
    if constexpr (sizeof(From) == 2) return all_halves<From>();
    else {
        auto cases = gradsync_test::rounding_cases<From>(HalfOracle::float16());
        const auto more = gradsync_test::rounding_cases<From>(HalfOracle::bfloat16());
        cases.insert(cases.end(), more.begin(), more.end());
        return cases;
    }
}

}  // namespace

TEST_CASE_TEMPLATE("convert agrees with the oracle for all halves and all hard cases, on every instruction set", From, gs::BFloat16,
                   gs::Float16, float, double) {
    const auto cases = hard_cases<From>();
    if constexpr (!std::is_same_v<From, gs::BFloat16>) check_all<From, gs::BFloat16>(cases);
    if constexpr (!std::is_same_v<From, gs::Float16>) check_all<From, gs::Float16>(cases);
    if constexpr (!std::is_same_v<From, float>) check_all<From, float>(cases);
    if constexpr (!std::is_same_v<From, double>) check_all<From, double>(cases);
}

TEST_CASE("convert: from double is rounded once, not twice") {
    // A tie in Float16, and a little more: by way of float it would look like the tie, and go down to even.
    const double above_tie = 1.0 + 0x1p-11 + 0x1p-40;
    gs::Float16 f16{};
    gradsync_test::convert(&above_tie, &f16, 1);
    CHECK(f16.bits() == 0x3c01u);
    const double above_tie_too = 1.0 + 0x1p-8 + 0x1p-40;
    gs::BFloat16 bf16{};
    gradsync_test::convert(&above_tie_too, &bf16, 1);
    CHECK(bf16.bits() == 0x3f81u);
}

#if GRADSYNC_X86_DISPATCH
TEST_CASE_TEMPLATE("convert: denormals survive flush-to-zero", Half, gs::BFloat16, gs::Float16) {
    const auto halves = all_halves<Half>();
    std::vector<float> widened(halves.size());
    std::vector<Half> back(halves.size());
    const auto floats = gradsync_test::rounding_cases<float>(
        sizeof(Half) == 2 && std::is_same_v<Half, gs::Float16> ? HalfOracle::float16() : HalfOracle::bfloat16());
    const auto doubles = hard_cases<double>();
    std::vector<Half> rounded(floats.size()), rounded_doubles(doubles.size());
    {
        const gradsync_test::FlushToZero guard;
        gradsync_test::convert(halves.data(), widened.data(), halves.size());
        gradsync_test::convert(widened.data(), back.data(), halves.size());
        gradsync_test::convert(floats.data(), rounded.data(), floats.size());
        gradsync_test::convert(doubles.data(), rounded_doubles.data(), doubles.size());
    }
    int wrong = 0;
    for (std::size_t i = 0; i < halves.size(); ++i)
        if (bits_of(widened[i]) != bits_of(static_cast<float>(halves[i])) || back[i] != Half(static_cast<float>(halves[i]))) ++wrong;
    for (std::size_t i = 0; i < floats.size(); ++i)
        if (rounded[i] != Half(floats[i])) ++wrong;
    for (std::size_t i = 0; i < doubles.size(); ++i)
        if (rounded_doubles[i] != convert_one<Half>(doubles[i])) ++wrong;
    CHECK(wrong == 0);
}
#endif

TEST_CASE_TEMPLATE("convert takes every length and misalignment, and writes nothing beside", From, gs::BFloat16, gs::Float16, float,
                   double) {
    const auto run = [&]<class To>(To) {
        std::vector<From> from(300);
        for (std::size_t i = 0; i < from.size(); ++i) {
            if constexpr (sizeof(From) == 2) from[i] = From(static_cast<float>(i) * 0.37f - 40.0f);
            else from[i] = static_cast<From>(i) * static_cast<From>(0.37) - static_cast<From>(40);
        }
        int wrong = 0;
        for (std::size_t length = 0; length <= 200; ++length)
            for (std::size_t offset = 0; offset < 17; offset += length % 16 == 0 ? 1 : 5) {
                std::vector<To> to(length + offset + 8);
                std::memset(static_cast<void*>(to.data()), 0x5a, to.size() * sizeof(To));
                const std::vector<To> before = to;
                gradsync_test::convert(from.data() + offset, to.data() + offset, length);
                for (std::size_t i = 0; i < to.size(); ++i) {
                    const bool inside = i >= offset && i < offset + length;
                    if (bits_of(to[i]) != bits_of(inside ? convert_one<To>(from[i]) : before[i])) ++wrong;
                }
            }
        CHECK(wrong == 0);
    };
    run(gs::BFloat16{});
    run(gs::Float16{});
    run(float{});
    run(double{});
}

TEST_CASE("convert: null pointers are fine where there is nothing to convert") {
    gradsync_test::convert(static_cast<const float*>(nullptr), static_cast<float*>(nullptr), 0);
    gradsync_test::convert(static_cast<const float*>(nullptr), static_cast<gs::BFloat16*>(nullptr), 0);
    gs::kernel::convert(nullptr, gs::DType::f16, nullptr, gs::DType::f64, 0);
}

TEST_CASE_TEMPLATE("convert_block converts to the accumulator and back", T, std::int8_t, std::uint8_t, std::int32_t, std::uint32_t,
                   std::int64_t, std::uint64_t, gs::Float16, gs::BFloat16, float, double) {
    using A = gs::kernel::accumulator_t<T>;
    static_assert(gs::dtype_of<A> == gs::accumulator_of(gs::dtype_of<T>));
    std::vector<T> from(64), back(64);
    for (std::size_t i = 0; i < 64; ++i) {
        if constexpr (sizeof(T) == 2) from[i] = T(static_cast<float>(i) - 20.0f);
        else from[i] = static_cast<T>(static_cast<int>(i) - 20);
    }
    std::vector<A> sums(64);
    gs::kernel::detail::convert_block(from.data(), sums.data(), 64);
    CHECK(sums[21] == A(1));
    gs::kernel::detail::convert_block(sums.data(), back.data(), 64);
    CHECK(from == back);
    gs::kernel::detail::convert_block(from.data() + 10, sums.data(), 13);  // any length
    CHECK(sums[11] == A(1));
}
