// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/kernel/largest.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "kernel_test.hpp"
#include "support/random.hpp"

namespace kernel = gradsync::kernel;
using gradsync_test::bits_of;
using gradsync_test::Random;

namespace {

/// By sorting: what is wrong with the k largest of `data`, on any instruction set, or "".
std::string wrong_largest(const std::vector<float>& data, std::size_t k) {
    std::vector<std::uint32_t> order(data.size());
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return (bits_of(data[a]) & 0x7fffffffu) > (bits_of(data[b]) & 0x7fffffffu); });
    order.resize(k);
    std::sort(order.begin(), order.end());

    std::vector<float> expected = data;
    for (const std::uint32_t place : order) expected[place] = 0;

    for (const kernel::Isa isa : gradsync_test::all_isas) {
        std::vector<float> rest = data, values(k + 1, 17);
        std::vector<std::uint32_t> places(k + 1, 17);  // one more, which is not to be touched
        const bool done =
            k != 0 && gradsync_test::run_with<kernel::detail::TakeLargest>(isa, rest.data(), rest.size(), k, places.data(), values.data());
        if (!done) kernel::take_largest(rest.data(), rest.size(), k, places.data(), values.data());  // this processor lacks it
        if (places[k] != 17 || values[k] != 17) return "more were taken than asked for";
        places.pop_back();
        if (places != order) return "not the largest, or not in their order";
        for (std::size_t t = 0; t < k; ++t)
            if (bits_of(values[t]) != bits_of(data[places[t]])) return "a value has changed";
        for (std::size_t i = 0; i < data.size(); ++i)
            if (bits_of(rest[i]) != bits_of(expected[i])) return "what was not taken has changed, or what was taken is not 0";
    }
    return {};
}

void check_largest(const std::vector<float>& data) {
    for (const std::size_t k :
         {std::size_t{0}, std::size_t{1}, std::size_t{2}, data.size() / 3, data.size() / 2, data.size() - 1, data.size()}) {
        if (k > data.size()) continue;
        CAPTURE(data.size());
        CAPTURE(k);
        CHECK(wrong_largest(data, k) == "");
    }
}

}  // namespace

TEST_CASE("take_largest finds the largest among numbers of many magnitudes") {
    Random random(1);
    for (const std::size_t count : {1u, 2u, 3u, 10u, 31u, 32u, 33u, 63u, 64u, 65u, 100u, 1000u, 20000u}) {
        std::vector<float> data(count);
        for (float& x : data)
            x = static_cast<float>(std::ldexp(static_cast<double>(random() % 4001) - 2000, static_cast<int>(random.below(40)) - 20));
        check_largest(data);
    }
}

TEST_CASE("take_largest finds the largest among any bits: NaN, infinities and denormals, too") {
    Random random(2);
    for (int run = 0; run < 20; ++run) {
        std::vector<float> data(1000);
        for (float& x : data) x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
        check_largest(data);
    }
}

TEST_CASE("take_largest takes the first of equal magnitudes") {
    Random random(3);
    using limits = std::numeric_limits<float>;
    const float few[] = {0.0f,
                         -0.0f,
                         1.0f,
                         -1.0f,
                         limits::denorm_min(),
                         -limits::denorm_min(),
                         limits::infinity(),
                         -limits::infinity(),
                         limits::max(),
                         limits::quiet_NaN()};
    for (const std::size_t kinds : {1u, 2u, 4u, 6u, 8u, 10u}) {
        std::vector<float> data(500);
        for (float& x : data) x = few[random.below(kinds)];
        check_largest(data);
    }
}

TEST_CASE("take_largest tells magnitudes apart that differ in their last bits only") {
    Random random(4);
    for (const unsigned bits : {1u, 9u, 10u, 11u, 20u, 21u}) {
        std::vector<float> data(2000);
        for (float& x : data) x = std::bit_cast<float>(0x3f400000u + static_cast<std::uint32_t>(random.below(std::size_t{1} << bits)));
        check_largest(data);
    }
}

TEST_CASE("take_largest: a NaN comes before an infinity, and that before all numbers") {
    std::vector<float> data{1, std::numeric_limits<float>::max(), -std::numeric_limits<float>::infinity(), 5,
                            -std::numeric_limits<float>::quiet_NaN()};
    std::uint32_t places[2];
    float values[2];
    kernel::take_largest(data.data(), data.size(), 1, places, values);
    CHECK(places[0] == 4);
    kernel::take_largest(data.data(), data.size(), 2, places, values);
    CHECK(places[0] == 1);
    CHECK(places[1] == 2);
    CHECK(data == std::vector<float>{1, 0, 0, 5, 0});
}
