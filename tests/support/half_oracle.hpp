// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "slow_build.hpp"

namespace gradsync_test {

/// The values of a 16-bit floating format, from its definition, and rounding by search among them: independent of
/// the library's bit arithmetic, and exact, since every value and every midpoint is a normal double.
class HalfOracle {
public:
    HalfOracle(int exponent_bits, int mantissa_bits) : mantissa_bits_(mantissa_bits) {
        const int bias = (1 << (exponent_bits - 1)) - 1;
        const int infinity = ((1 << exponent_bits) - 1) << mantissa_bits;
        for (int bits = 0; bits <= infinity; ++bits) {  // the last one is what infinity would be, were it finite
            const int exponent = bits >> mantissa_bits;
            const int fraction = bits & ((1 << mantissa_bits) - 1);
            values_.push_back(exponent == 0 ? std::ldexp(fraction, 1 - bias - mantissa_bits)
                                            : std::ldexp(fraction + (1 << mantissa_bits), exponent - bias - mantissa_bits));
        }
    }

    static const HalfOracle& float16() {
        static const HalfOracle oracle(5, 10);
        return oracle;
    }
    static const HalfOracle& bfloat16() {
        static const HalfOracle oracle(8, 7);
        return oracle;
    }

    /// The bits of +infinity, and how many finite numbers there are that are not negative.
    std::uint16_t infinity() const { return static_cast<std::uint16_t>(values_.size() - 1); }
    std::uint16_t quiet_bit() const { return static_cast<std::uint16_t>(1u << (mantissa_bits_ - 1)); }
    int mantissa_bits() const { return mantissa_bits_; }

    /// The value of bits in [0, infinity()).
    double value(std::uint16_t bits) const { return values_[bits]; }

    /// Halfway between `bits` and its upper neighbour.
    double midpoint(std::uint16_t bits) const { return (values_[bits] + values_[bits + 1u]) / 2; }

    /// The bits of `magnitude`, not negative and no NaN, rounded to nearest, ties to even.
    std::uint16_t round(double magnitude) const {
        if (magnitude >= values_.back()) return infinity();
        const auto above = std::upper_bound(values_.begin(), values_.end(), magnitude);
        const auto bits = static_cast<std::uint16_t>(above - values_.begin() - 1);
        const double middle = midpoint(bits);
        const bool up = magnitude > middle || (magnitude == middle && (bits & 1u));
        return static_cast<std::uint16_t>(bits + (up ? 1 : 0));
    }

    /// What a float or double with these fields becomes, whatever it is.
    std::uint16_t expected(float value) const { return expected_bits<std::uint32_t>(value, 23); }
    std::uint16_t expected(double value) const { return expected_bits<std::uint64_t>(value, 52); }

private:
    template <class U, class From>
    std::uint16_t expected_bits(From value, int from_mantissa) const {
        const U bits = std::bit_cast<U>(value);
        const U magnitude = bits & (~U{0} >> 1);
        const U from_infinity = (~U{0} >> 1) >> from_mantissa << from_mantissa;
        const auto sign = static_cast<std::uint16_t>(bits >> (sizeof(U) * 8 - 1) << 15);
        if (magnitude > from_infinity) {
            const U payload = magnitude >> (from_mantissa - mantissa_bits_) & ((U{1} << mantissa_bits_) - 1);
            return static_cast<std::uint16_t>(sign | infinity() | quiet_bit() | payload);
        }
        if (magnitude == from_infinity) return static_cast<std::uint16_t>(sign | infinity());
        return static_cast<std::uint16_t>(sign | round(exact<From>(magnitude, from_mantissa)));
    }

    /// By its fields, because a denormal float would be 0 in a thread that runs with denormals-are-zero.
    template <class From, class U>
    static double exact(U magnitude, int mantissa) {
        if constexpr (sizeof(From) == 8) return std::bit_cast<double>(magnitude);
        const int exponent = static_cast<int>(magnitude >> mantissa);
        const U fraction = magnitude & ((U{1} << mantissa) - 1);
        const U significand = exponent == 0 ? fraction : fraction | U{1} << mantissa;
        return std::ldexp(static_cast<double>(significand), std::max(exponent, 1) - 127 - mantissa);
    }

    int mantissa_bits_;
    std::vector<double> values_;
};

/// The bits of a double that is not negative, as From, which can represent it. Without the processor's conversion,
/// which makes denormal floats 0 in a thread that flushes to zero.
template <class From>
auto bits_as(double value) {
    if constexpr (sizeof(From) == 8) return std::bit_cast<std::uint64_t>(value);
    else if (value < 0x1p-126) return static_cast<std::uint32_t>(std::ldexp(value, 149));
    else return std::bit_cast<std::uint32_t>(static_cast<float>(value));
}

/// Floats or doubles worth trying: around every value and every rounding boundary of a 16-bit format, and a sample
/// of all bit patterns (so infinities, NaNs and denormals too), of both signs.
template <class From>
std::vector<From> rounding_cases(const HalfOracle& oracle) {
    using U = std::conditional_t<sizeof(From) == 4, std::uint32_t, std::uint64_t>;
    std::vector<From> cases;
    const auto add = [&](U bits) {
        cases.push_back(std::bit_cast<From>(bits));
        cases.push_back(std::bit_cast<From>(static_cast<U>(bits | ~(~U{0} >> 1))));
    };
    Thinned thinned;
    for (std::uint16_t bits = 0; bits < oracle.infinity(); ++bits) {
        if (!thinned.next()) continue;
        for (const double value : {oracle.value(bits), oracle.midpoint(bits)}) {
            const U center = bits_as<From>(value);
            add(center);
            add(center + 1);
            if (center != 0) add(center - 1);
        }
    }
    constexpr std::size_t more = number_of_cases(500'000);
    const U stride = static_cast<U>(~U{0} / more) | 1;
    U bits = 0;
    for (std::size_t i = 0; i < more; ++i, bits += stride) add(bits);
    const U infinity = (~U{0} >> 1) >> (sizeof(From) == 4 ? 23 : 52) << (sizeof(From) == 4 ? 23 : 52);
    for (const U special : {infinity, U(infinity - 1), U(infinity + 1), U(~U{0} >> 1), U{1}}) add(special);
    return cases;
}

}  // namespace gradsync_test
