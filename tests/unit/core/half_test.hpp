// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <doctest/doctest.h>

#include <bit>
#include <cstdint>

#include "support/half_oracle.hpp"

namespace gradsync_test {

/// All that a 16-bit floating type promises, against the oracle of its format.
template <class Half>
void check_half(const HalfOracle& oracle) {
    SUBCASE("every bit pattern widens to its value") {
        int wrong = 0;
        for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
            const auto actual = std::bit_cast<std::uint32_t>(static_cast<float>(Half::from_bits(static_cast<std::uint16_t>(bits))));
            const std::uint32_t sign = (bits & 0x8000u) << 16;
            const auto magnitude = static_cast<std::uint16_t>(bits & 0x7fffu);
            std::uint32_t expected = 0;
            if (magnitude >= oracle.infinity())  // infinity and NaN: the payload moves up
                expected = 0x7f80'0000u | std::uint32_t(magnitude - oracle.infinity()) << (23 - oracle.mantissa_bits());
            else expected = bits_as<float>(oracle.value(magnitude));
            if (actual != (sign | expected) && wrong++ == 0) CHECK_MESSAGE(actual == (sign | expected), "bits ", bits);
        }
        CHECK(wrong == 0);
    }
    SUBCASE("every bit pattern survives the way to float and back, a NaN made quiet") {
        int wrong = 0;
        for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
            const auto half = static_cast<std::uint16_t>(bits);
            const bool nan = (half & 0x7fffu) > oracle.infinity();
            const auto expected = static_cast<std::uint16_t>(nan ? half | oracle.quiet_bit() : half);
            if (Half(static_cast<float>(Half::from_bits(half))).bits() != expected && wrong++ == 0) CHECK_MESSAGE(false, "bits ", bits);
        }
        CHECK(wrong == 0);
    }
    SUBCASE("from float: nearest, ties to even, at every boundary and over a sample of all floats") {
        int wrong = 0;
        for (const float value : rounding_cases<float>(oracle))
            if (Half(value).bits() != oracle.expected(value) && wrong++ == 0)
                CHECK_MESSAGE(Half(value).bits() == oracle.expected(value), "float bits ", std::bit_cast<std::uint32_t>(value));
        CHECK(wrong == 0);
    }
    SUBCASE("in constant expressions") {
        static_assert(static_cast<float>(Half(1.5f)) == 1.5f);
        static_assert(Half(-0.0f).bits() == 0x8000u);
        static_assert(Half(0.0f) != Half(-0.0f));
        static_assert(Half(2.0f) == Half::from_bits(Half(2.0f).bits()));
    }
}

}  // namespace gradsync_test
