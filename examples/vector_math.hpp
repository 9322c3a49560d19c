// SPDX-License-Identifier: BSL-1.0
#pragma once
// Branch-free exp and GELU for float: plain arithmetic, so that loops over them vectorise without a maths library.

#include <bit>
#include <cstdint>

namespace gradsync_train {

/// e^x to about 2 units in the last place; below -87 it returns e^-87 (about 1.6e-38), above 88 e^88.
inline float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    // x = n ln 2 + r with |r| <= ln 2 / 2. Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    constexpr float rounder = 12582912.0f;
    const float n = (x * 1.44269504f + rounder) - rounder;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    // Cephes expf: minimax polynomial of (e^r - 1 - r) / r^2.
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    const auto power_of_two = std::bit_cast<float>((static_cast<std::int32_t>(n) + 127) << 23);
    return p * power_of_two;
}

/// The standard normal distribution at x: its density and its cumulative probability (absolute error below 2e-7).
struct Normal {
    float density;
    float cumulative;
};

inline Normal normal(float x) {
    const float magnitude = x < 0.0f ? -x : x;
    const float gaussian = fast_exp(-0.5f * x * x);
    // Abramowitz and Stegun 7.1.26, erfc(|x| / sqrt 2): it shares its exponential with the density.
    const float t = 1.0f / (1.0f + 0.3275911f * 0.70710678f * magnitude);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const float tail = 0.5f * p * t * gaussian;
    return {0.39894228f * gaussian, x < 0.0f ? tail : 1.0f - tail};
}

/// GELU, the exact form: x times the probability that a standard normal variable is below x.
inline float gelu(float x) { return x * normal(x).cumulative; }

inline float gelu_derivative(float x) {
    const Normal at = normal(x);
    return at.cumulative + x * at.density;
}

}  // namespace gradsync_train
