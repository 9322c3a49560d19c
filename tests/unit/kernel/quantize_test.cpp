// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/kernel/quantize.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "unit/kernel/kernel_test.hpp"

namespace kernel = gradsync::kernel;
using kernel::detail::Quantize, kernel::detail::SumQuantized;

namespace {

constexpr std::size_t per_step = kernel::quantized_block;  // elements of one step
constexpr unsigned all_bits[] = {1, 4, 8};
constexpr std::size_t quantized_counts[] = {0, 1, 2, 7, 8, 9, 31, 33, 255, 256, 257, 264, 511, 1000, 4099};

/// Of magnitudes from 1e-3 to 1e3, blocks apart.
std::vector<float> some_numbers(std::size_t count, unsigned seed = 1) {
    std::vector<float> numbers(count);
    std::uint32_t state = seed * 2654435761u;
    for (std::size_t i = 0; i < count; ++i) {
        state = state * 1664525u + 1013904223u;
        numbers[i] =
            (static_cast<float>(state >> 8) / static_cast<float>(1 << 23) - 1) * std::pow(10.0f, static_cast<float>(i / per_step % 7) - 3);
    }
    return numbers;
}

struct Written {
    std::vector<std::uint32_t> words;
    std::vector<float> left;
};
Written write(std::vector<float> numbers, unsigned bits) {
    constexpr std::uint32_t untouched = 0x5a5a5a5a;
    const std::size_t size = kernel::quantized_words(numbers.size(), bits);
    std::vector<std::uint32_t> words(size + 1, untouched);
    kernel::quantize(numbers.data(), numbers.size(), bits, words.data());
    CHECK(words.back() == untouched);
    words.pop_back();
    return {std::move(words), std::move(numbers)};
}
std::vector<float> read(const std::vector<std::uint32_t>& words, std::size_t count, unsigned bits, float factor = 1) {
    std::vector<float> numbers(count + 1, 12345.0f);
    kernel::sum_quantized(words.data(), 0, 1, count, bits, factor, numbers.data());
    CHECK(numbers.back() == 12345.0f);
    numbers.pop_back();
    return numbers;
}

/// By their bits, as a NaN is not equal to itself.
bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

}  // namespace

TEST_CASE("quantize: what is read and what is left are the number, each level is the nearest one") {
    for (const unsigned bits : all_bits)
        for (const std::size_t count : quantized_counts) {
            CAPTURE(bits);
            CAPTURE(count);
            const std::vector<float> numbers = some_numbers(count);
            const Written written = write(numbers, bits);
            const std::vector<float> said = read(written.words, count, bits);
            for (std::size_t first = 0; first < count; first += per_step) {
                const std::size_t end = std::min(first + per_step, count);
                double largest = 0, mean = 0;
                for (std::size_t i = first; i < end; ++i) {
                    largest = std::max(largest, std::abs(static_cast<double>(numbers[i])));
                    mean += std::abs(static_cast<double>(numbers[i])) / static_cast<double>(end - first);
                }
                const double levels = bits == 8 ? 127 : 7, step = bits == 1 ? mean : largest / levels, accuracy = 1e-6 * largest;
                for (std::size_t i = first; i < end; ++i) {
                    const double x = numbers[i];
                    const double nearest = bits == 1 ? (std::signbit(x) ? -step : step) : std::round(x / step) * step;
                    // Between two levels either may be the nearest, as far as an f32 tells.
                    const bool right =
                        std::abs(said[i] - nearest) <= accuracy || (bits != 1 && std::abs(std::abs(said[i] - x) - step / 2) <= accuracy);
                    if (!right) FAIL_CHECK("element " << i << ": " << said[i] << " is said of " << x << " in steps of " << step);
                    if (std::abs(static_cast<double>(said[i]) + static_cast<double>(written.left[i]) - x) > accuracy)
                        FAIL_CHECK("element " << i << ": " << x << " is said as " << said[i] << ", and " << written.left[i] << " is left");
                }
            }
        }
}

TEST_CASE("quantize: words are as many as elements of so many bits take, and a step for each block") {
    CHECK(kernel::quantized_words(0, 8) == 0);
    CHECK(kernel::quantized_words(1, 8) == 2);
    CHECK(kernel::quantized_words(4, 8) == 2);
    CHECK(kernel::quantized_words(5, 8) == 3);
    CHECK(kernel::quantized_words(33, 1) == 3);
    CHECK(kernel::quantized_words(256, 8) == 65);
    CHECK(kernel::quantized_words(256, 4) == 33);
    CHECK(kernel::quantized_words(256, 1) == 9);
    CHECK(kernel::quantized_words(512 + 9, 4) == 2 * 33 + 3);
}

TEST_CASE("quantize: what came of the last step is said in the next ones, so that their sum is the number's") {
    const std::vector<float> numbers = some_numbers(700);
    for (const unsigned bits : all_bits) {
        CAPTURE(bits);
        std::vector<float> held(numbers.size());
        std::vector<double> said(numbers.size());
        constexpr int steps = 200;
        for (int step = 0; step < steps; ++step) {
            for (std::size_t i = 0; i < held.size(); ++i) held[i] += numbers[i];
            Written written = write(held, bits);
            const std::vector<float> now = read(written.words, held.size(), bits);
            for (std::size_t i = 0; i < said.size(); ++i) said[i] += now[i];
            held = std::move(written.left);
        }
        for (std::size_t first = 0; first < numbers.size(); first += per_step) {
            const std::size_t end = std::min(first + per_step, numbers.size());
            float largest = 0;
            for (std::size_t i = first; i < end; ++i) largest = std::max(largest, std::abs(numbers[i]));
            for (std::size_t i = first; i < end; ++i)  // what is held back does not grow with the steps
                CHECK(std::abs(said[i] / steps - static_cast<double>(numbers[i])) <= 0.15 * static_cast<double>(largest));
        }
    }
}

TEST_CASE("quantize: a block that is not finite is NaN, leaves nothing, and does not touch the others") {
    for (const unsigned bits : all_bits)
        for (const float bad :
             {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()})
            for (const std::size_t place : {std::size_t{0}, per_step - 1, 2 * per_step + 5}) {
                CAPTURE(bits);
                CAPTURE(place);
                std::vector<float> numbers = some_numbers(2 * per_step + 10);
                const Written without = write(numbers, bits);
                const std::vector<float> usual = read(without.words, numbers.size(), bits);
                numbers[place] = bad;
                const Written written = write(numbers, bits);
                const std::vector<float> said = read(written.words, numbers.size(), bits);
                std::size_t wrong = 0;
                for (std::size_t i = 0; i < numbers.size(); ++i) {
                    const bool lost = i / per_step == place / per_step;
                    wrong +=
                        lost ? !std::isnan(said[i]) || written.left[i] != 0 : said[i] != usual[i] || written.left[i] != without.left[i];
                }
                CHECK(wrong == 0);
            }
}

TEST_CASE(
    "quantize: a block of zeros, and one too small to have a step, say nothing and lose nothing; the largest numbers do not overflow") {
    for (const unsigned bits : all_bits) {
        CAPTURE(bits);
        for (const float tiny : {0.0f, -0.0f, std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::min() / 2}) {
            const std::vector<float> numbers(300, tiny);
            const Written written = write(numbers, bits);
            CHECK(written.left == numbers);
            CHECK(read(written.words, 300, bits) == std::vector<float>(300));
        }
        for (const std::size_t count : quantized_counts) {
            std::vector<float> largest(count, std::numeric_limits<float>::max());
            if (count > 7) largest[7] = -largest[7];
            const Written written = write(largest, bits);
            const std::vector<float> said = read(written.words, count, bits);
            std::size_t wrong = 0;
            for (std::size_t i = 0; i < count; ++i)
                wrong += !(std::abs(said[i] / largest[i] - 1) < 1e-5f) || !std::isfinite(written.left[i]);
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE("quantize: messages are added up in their order, times a factor") {
    for (const unsigned bits : all_bits)
        for (const std::size_t count : quantized_counts) {
            CAPTURE(bits);
            CAPTURE(count);
            constexpr std::size_t messages = 3, gap = 5;
            const float factor = 0.3f;
            const std::size_t stride = kernel::quantized_words(count, bits) + gap;
            std::vector<std::uint32_t> words(messages * stride);
            std::vector<float> expected(count);
            for (std::size_t r = 0; r < messages; ++r) {
                const Written written = write(some_numbers(count, static_cast<unsigned>(r) + 1), bits);
                std::copy(written.words.begin(), written.words.end(), words.begin() + static_cast<std::ptrdiff_t>(r * stride));
                const std::vector<float> own = read(written.words, count, bits, factor);
                for (std::size_t i = 0; i < count; ++i) expected[i] += own[i];
            }
            std::vector<float> sums(count);
            kernel::sum_quantized(words.data(), stride, messages, count, bits, factor, sums.data());
            CHECK(sums == expected);
        }
}

namespace {

template <unsigned bits>
void check_instruction_sets() {
    for (const std::size_t count : quantized_counts) {
        std::vector<float> left, sums;
        std::vector<std::uint32_t> words;
        for (const kernel::Isa isa : gradsync_test::all_isas) {
            std::vector<float> own_left = some_numbers(count), own_sums(count);
            std::vector<std::uint32_t> own_words(kernel::quantized_words(count, bits));
            if (!gradsync_test::run_with<Quantize<bits>>(isa, own_left.data(), count, own_words.data())) continue;
            if (isa == kernel::Isa::baseline) words = own_words, left = own_left;
            gradsync_test::run_with<SumQuantized<bits>>(isa, static_cast<const std::uint32_t*>(words.data()), std::size_t{0},
                                                        std::size_t{1}, count, 0.7f, own_sums.data());
            if (isa == kernel::Isa::baseline) sums = own_sums;
            CHECK(same(own_sums, sums));
            CHECK(own_words == words);
            CHECK(same(own_left, left));
        }
    }
}

}  // namespace

TEST_CASE("quantize gives the same bits with every instruction set") {
    check_instruction_sets<1>();
    check_instruction_sets<4>();
    check_instruction_sets<8>();
}
