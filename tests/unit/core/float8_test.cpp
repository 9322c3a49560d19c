// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/storage_floats.hpp>

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "support/float8_oracle.hpp"

using gradsync::Float8E4M3;
using gradsync::Float8E5M2;
using gradsync_test::Float8Oracle;

namespace {

template <class F>
std::uint8_t rounded(float value) {
    return F(value).bits();
}

/// The float next to a positive one.
float above(float value) { return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) + 1); }
float below(float value) { return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) - 1); }

}  // namespace

TEST_CASE_TEMPLATE("Float8: every code widens to its value", F, Float8E4M3, Float8E5M2) {
    const auto& oracle = Float8Oracle::of<F>();
    for (unsigned code = 0; code < 256; ++code) {
        CAPTURE(code);
        const auto value = static_cast<float>(F::from_bits(static_cast<std::uint8_t>(code)));
        const unsigned magnitude = code & 0x7f;
        if (oracle.is_nan(magnitude)) {
            CHECK(std::isnan(value));
        } else {
            CHECK(std::abs(static_cast<double>(value)) == oracle.value(magnitude));
        }
        CHECK(std::signbit(value) == (code >= 0x80));
    }
}

TEST_CASE_TEMPLATE("Float8: every code survives the way to float and back; infinities become the largest number, NaNs quiet", F, Float8E4M3,
                   Float8E5M2) {
    const auto& oracle = Float8Oracle::of<F>();
    for (unsigned code = 0; code < 256; ++code) {
        CAPTURE(code);
        const unsigned magnitude = code & 0x7f;
        unsigned expected = code;
        if (oracle.is_nan(magnitude)) expected |= F::quiet_nan;
        else if (std::isinf(oracle.value(magnitude))) expected = (code & 0x80) | F::largest;
        CHECK(rounded<F>(static_cast<float>(F::from_bits(static_cast<std::uint8_t>(code)))) == expected);
    }
}

TEST_CASE_TEMPLATE("Float8 rounds to nearest, ties to even, at every value and every midpoint", F, Float8E4M3, Float8E5M2) {
    const auto& oracle = Float8Oracle::of<F>();
    for (unsigned code = 0; code < oracle.largest(); ++code) {
        CAPTURE(code);
        const auto middle = static_cast<float>((oracle.value(code) + oracle.value(code + 1)) / 2);  // exact
        const unsigned even = code % 2 == 0 ? code : code + 1;
        CHECK(rounded<F>(middle) == even);
        CHECK(rounded<F>(below(middle)) == code);
        CHECK(rounded<F>(above(middle)) == code + 1);
        CHECK(rounded<F>(-middle) == (even | 0x80));
        CHECK(rounded<F>(-below(middle)) == (code | 0x80));
        CHECK(rounded<F>(-above(middle)) == ((code + 1) | 0x80));
    }
}

TEST_CASE_TEMPLATE("Float8 rounds a sample of all floats, of both signs, as the oracle does", F, Float8E4M3, Float8E5M2) {
    const auto& oracle = Float8Oracle::of<F>();
    int wrong = 0;
    for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 4099) {
        const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
        if (rounded<F>(value) != oracle.expected(value) && wrong++ == 0) CHECK_MESSAGE(false, "float bits ", bits);
    }
    CHECK(wrong == 0);
}

TEST_CASE("Float8 has the largest, smallest and rounded numbers of its formats") {
    CHECK(rounded<Float8E4M3>(1.0f) == 0x38);
    CHECK(rounded<Float8E4M3>(448.0f) == 0x7e);
    CHECK(rounded<Float8E4M3>(1e30f) == 0x7e);
    CHECK(rounded<Float8E4M3>(-INFINITY) == 0xfe);
    CHECK(rounded<Float8E4M3>(NAN) == 0x7f);
    CHECK(rounded<Float8E4M3>(0x1p-9f) == 0x01);
    CHECK(rounded<Float8E4M3>(0x1p-10f) == 0x00);
    CHECK(rounded<Float8E4M3>(-0x1.2p-10f) == 0x81);
    CHECK(rounded<Float8E5M2>(1.0f) == 0x3c);
    CHECK(rounded<Float8E5M2>(57344.0f) == 0x7b);
    CHECK(rounded<Float8E5M2>(INFINITY) == 0x7b);
    CHECK(rounded<Float8E5M2>(NAN) == 0x7e);
    CHECK(rounded<Float8E5M2>(0x1p-16f) == 0x01);
    CHECK(std::isinf(static_cast<float>(Float8E5M2::from_bits(0xfc))));
    static_assert(static_cast<float>(Float8E4M3(1.5f)) == 1.5f && Float8E5M2(-0.0f).bits() == 0x80u);
    static_assert(Float8E4M3(0.0f) != Float8E4M3(-0.0f) && Float8E4M3(2.0f) == Float8E4M3::from_bits(0x40));
}
