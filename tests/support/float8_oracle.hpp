// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gradsync/core/storage_floats.hpp>

namespace gradsync_test {

/// The values of an 8-bit floating format, from its definition, and rounding by search among them, in double: independent of the
/// library's bit arithmetic. What is too large becomes the largest.
class Float8Oracle {
public:
    Float8Oracle(int exponent_bits, int mantissa_bits, unsigned largest, bool has_infinity)
        : largest_(largest), mantissa_bits_(mantissa_bits), has_infinity_(has_infinity) {
        const int bias = (1 << (exponent_bits - 1)) - 1;
        for (unsigned code = 0; code <= largest; ++code) {
            const int exponent = static_cast<int>(code >> mantissa_bits), fraction = static_cast<int>(code & ((1u << mantissa_bits) - 1));
            values_.push_back(exponent == 0 ? std::ldexp(fraction, 1 - bias - mantissa_bits)
                                            : std::ldexp(fraction + (1 << mantissa_bits), exponent - bias - mantissa_bits));
        }
    }

    template <class F>
    static const Float8Oracle& of() {
        static const Float8Oracle e4m3(4, 3, 0x7e, false), e5m2(5, 2, 0x7b, true);
        return F::mantissa == 3 ? e4m3 : e5m2;
    }

    unsigned largest() const { return largest_; }
    bool is_nan(unsigned magnitude) const { return magnitude > largest_ + (has_infinity_ ? 1 : 0); }
    /// Of a code without sign that is no NaN.
    double value(unsigned magnitude) const { return magnitude > largest_ ? std::numeric_limits<double>::infinity() : values_[magnitude]; }

    /// The code that a number rounds to; of a NaN: quiet, with the upper bits of its payload.
    std::uint8_t expected(double x) const {
        const unsigned sign = std::signbit(x) ? 0x80 : 0;
        if (std::isnan(x)) {
            std::uint64_t bits;
            static_assert(sizeof bits == sizeof x);
            bits = __builtin_bit_cast(std::uint64_t, x);
            const unsigned all = (1u << mantissa_bits_) - 1, payload = static_cast<unsigned>(bits >> (52 - mantissa_bits_)) & all;
            return static_cast<std::uint8_t>(sign | (has_infinity_ ? 0x7e : 0x7f) | payload);
        }
        const double magnitude = std::abs(x);
        unsigned code = 0;
        while (code < largest_ && values_[code + 1] <= magnitude) ++code;
        if (code < largest_) {
            const double middle = (values_[code] + values_[code + 1]) / 2;
            if (magnitude > middle || (magnitude == middle && code % 2 == 1)) ++code;
        }
        return static_cast<std::uint8_t>(sign | code);
    }
    std::uint8_t expected(float x) const { return expected(static_cast<double>(x)); }

private:
    unsigned largest_;
    int mantissa_bits_;
    bool has_infinity_;
    std::vector<double> values_;
};

}  // namespace gradsync_test
