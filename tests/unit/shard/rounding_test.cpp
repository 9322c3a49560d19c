// SPDX-License-Identifier: BSL-1.0
// How master weights become weights: stochastic rounding, and an optimizer's hook.
#include <gradsync/gradsync.hpp>
#include <gradsync/shard/rounding.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "support/ranks.hpp"

namespace gs = gradsync;

namespace {

std::vector<float> rounded(const std::vector<float>& numbers, std::uint64_t seed, std::size_t parameter = 0, std::size_t first = 0) {
    std::vector<gs::BFloat16> narrow(numbers.size());
    gs::round_stochastically({.parameter = parameter, .first = first, .master = numbers, .rounded = gs::buffer(narrow)}, seed);
    std::vector<float> wide;
    for (const gs::BFloat16 x : narrow) wide.push_back(static_cast<float>(x));
    return wide;
}

/// Subtracts 1e-4 from each weight: far less than half a gap of bf16 at 1.
struct Creep {
    bool stochastic = true;
    std::size_t steps = 0;
    static std::size_t state_count() { return 0; }
    void begin_step() { ++steps; }
    void step(const gs::OptimizerSlice<float>& s) const {
        for (float& w : s.value) w -= 1e-4f;
    }
    void round(const gs::RoundingSlice& s) const {
        if (stochastic) gs::round_stochastically(s, 11 + steps);
        else gs::kernel::copy(gs::const_buffer(s.master), s.rounded);
    }
};

constexpr std::size_t rounded_counts[] = {1000, 1, 333};

std::vector<float> to_floats(gs::ConstBufferView view) {
    std::vector<float> wide(view.count);
    gs::kernel::copy(view, gs::buffer(wide));
    return wide;
}

/// The weights after three steps, on the last rank.
std::vector<float> optimized(int ranks, bool stochastic) {
    std::vector<float> weights;
    gs::run_threads(ranks, [&](gs::ThreadBackend comm) {
        std::vector<std::vector<gs::BFloat16>> values, gradients;
        std::vector<gs::ParameterView> parameters;
        for (const std::size_t count : rounded_counts) {
            values.emplace_back(count, gs::BFloat16(1.0f));
            gradients.emplace_back(count, gs::BFloat16(0.0f));
        }
        for (std::size_t i = 0; i < values.size(); ++i)
            parameters.push_back({.name = "p" + std::to_string(i), .value = gs::buffer(values[i]), .gradient = gs::buffer(gradients[i])});
        gs::ShardedOptimizer sharded(comm, parameters, Creep{.stochastic = stochastic}, gs::SizeCappedBuckets{700});
        sharded.broadcast_parameters();
        for (int step = 0; step < 3; ++step) {
            for (std::size_t i = values.size(); i-- > 0;) sharded.mark_ready(i);
            sharded.finish();
            sharded.step();
        }
        const auto before = to_floats(sharded.parameter_value(0));
        sharded.publish();  // the same step: the same bits
        CHECK(to_floats(sharded.parameter_value(0)) == before);
        if (comm.rank() != ranks - 1) return;
        for (std::size_t i = 0; i < values.size(); ++i)
            for (const float w : to_floats(sharded.parameter_value(i))) weights.push_back(w);
    });
    return weights;
}

/// The same with ShardedParameters.
std::vector<float> fully_sharded(int ranks) {
    std::vector<float> weights;
    gs::run_threads(ranks, [&](gs::ThreadBackend comm) {
        std::vector<std::vector<gs::BFloat16>> values;
        std::vector<gs::ParameterView> parameters;
        for (const std::size_t count : rounded_counts) values.emplace_back(count, gs::BFloat16(1.0f));
        for (std::size_t i = 0; i < values.size(); ++i)
            parameters.push_back({.name = "p" + std::to_string(i), .value = gs::buffer(values[i])});
        gs::ShardedParameters sharded(comm, parameters, Creep{}, gs::Units({0, 1, 1}));
        sharded.broadcast_parameters();
        for (int step = 0; step < 3; ++step) {
            const auto first = sharded.gather(0), second = sharded.gather(1);
            for (std::size_t i = values.size(); i-- > 0;) {
                const gs::BufferView gradient = sharded.acquire_gradient(i);
                std::memset(gradient.data, 0, gradient.bytes());
                sharded.mark_ready(i);
            }
            sharded.finish();
            sharded.step();
        }
        const auto first = sharded.gather(0), second = sharded.gather(1);
        if (comm.rank() != ranks - 1) return;
        for (std::size_t i = 0; i < values.size(); ++i)
            for (const float w : to_floats(sharded.parameter_value(i))) weights.push_back(w);
    });
    return weights;
}

}  // namespace

TEST_CASE("stochastic rounding takes one of the two neighbours, and is right on average") {
    for (const float x : {1.0009765f, -1.3f, 0.3f, 3.1415927f, -17.77f, 100.6f, 0.015625f + 1e-5f}) {
        CAPTURE(x);
        constexpr std::size_t draws = 40000;
        const std::vector<float> results = rounded(std::vector<float>(draws, x), 7);
        float low = results[0], high = results[0];
        double sum = 0;
        for (const float r : results) {
            low = std::fmin(low, r);
            high = std::fmax(high, r);
            sum += static_cast<double>(r) - static_cast<double>(x);
        }
        // They are neighbours if no number of the type lies between them: their middle rounds to one of them.
        const float middle = static_cast<float>(gs::BFloat16(low + (high - low) / 2));
        CHECK(low < x);
        CHECK(x < high);
        CHECK((middle == low || middle == high));
        const double gap = static_cast<double>(high) - static_cast<double>(low);
        CHECK(std::fabs(sum / draws) < 5 * gap * 0.5 / std::sqrt(static_cast<double>(draws)));  // 5 standard deviations at most
    }
}

TEST_CASE("numbers of the narrow type, infinities, NaNs and numbers beyond the largest are rounded to nearest") {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const std::vector<float> exact{0, -0.0f, 1, -1, 0.5f, 96, infinity, -infinity, 3.3895314e38f};
    for (std::uint64_t seed = 0; seed < 50; ++seed) {
        const auto results = rounded(exact, seed);
        for (std::size_t k = 0; k < exact.size(); ++k) {
            CHECK(results[k] == exact[k]);
            CHECK(std::signbit(results[k]) == std::signbit(exact[k]));
        }
        CHECK(std::isnan(rounded({std::nanf("")}, seed)[0]));
        CHECK(rounded({3.39e38f}, seed)[0] == 3.3895314e38f);  // less than half a place above the largest
        CHECK(rounded({3.4e38f}, seed)[0] == infinity);
        const float tiny = rounded({1e-41f}, seed)[0];  // between zero and the least number
        CHECK(tiny >= 0);
        CHECK(tiny <= 1e-40f);
    }
}

TEST_CASE("stochastic rounding depends on the seed, the parameter and the element, not on how a parameter is cut") {
    const std::vector<float> numbers(1000, 1.003f);
    const auto whole = rounded(numbers, 3);
    const auto tail = rounded(std::vector<float>(600, 1.003f), 3, 0, 400);
    CHECK(std::vector<float>(whole.begin() + 400, whole.end()) == tail);
    CHECK(rounded(numbers, 4) != whole);
    CHECK(rounded(numbers, 3, 1) != whole);
    CHECK(rounded(numbers, 3, 0, 1) != whole);
}

TEST_CASE("stochastic rounding refuses weights that cannot be rounded") {
    const std::vector<float> numbers(2, 1.0f);
    std::vector<float> wide(2);
    std::vector<gs::BFloat16> one(1);
    CHECK(gradsync_test::outcome_of([&] { gs::round_stochastically({.master = numbers, .rounded = gs::buffer(wide)}, 0); }).text ==
          "round_stochastically: 2 numbers cannot be rounded to 2 of f32; give as many of bf16");
    CHECK_THROWS_AS(gs::round_stochastically({.master = numbers, .rounded = gs::buffer(one)}, 0), const gs::Error&);
}

TEST_CASE("an optimizer rounds its weights, with the same bits on any number of ranks and in every stage") {
    const std::vector<float> expected = [] {
        std::vector<float> result;
        for (std::size_t i = 0; i < 3; ++i) {
            float master = 1;
            for (int step = 0; step < 3; ++step) master -= 1e-4f;
            for (const float w : rounded(std::vector<float>(rounded_counts[i], master), 11 + 3, i)) result.push_back(w);
        }
        return result;
    }();
    CHECK(expected != std::vector<float>(expected.size(), 1.0f));  // some have moved
    for (const int ranks : gradsync_test::rank_counts()) {
        CAPTURE(ranks);
        CHECK(optimized(ranks, true) == expected);
        CHECK(fully_sharded(ranks) == expected);
    }
    CHECK(optimized(2, false) == std::vector<float>(expected.size(), 1.0f));  // to nearest, all updates are lost
}

TEST_CASE("parameters that no rank used keep their weights, to the bit") {
    gs::run_threads(2, [](gs::ThreadBackend comm) {
        std::vector<std::vector<gs::BFloat16>> values(2, std::vector<gs::BFloat16>(64, gs::BFloat16(1.0f))), gradients = values;
        std::vector<gs::ParameterView> parameters;
        for (std::size_t i = 0; i < 2; ++i)
            parameters.push_back({.name = "p" + std::to_string(i), .value = gs::buffer(values[i]), .gradient = gs::buffer(gradients[i])});
        gs::ShardedOptimizer sharded(comm, parameters, Creep{},
                                     gs::ShardingOptions{.reducer = {.unused = gs::UnusedParameters::find_unused}});
        sharded.broadcast_parameters();
        std::vector<float> before;
        for (int step = 0; step < 4; ++step) {
            if (step == 0) sharded.mark_ready(0);  // then it is no number of bf16
            sharded.mark_ready(1);
            sharded.finish();
            sharded.step();
            if (step == 0) before = to_floats(sharded.parameter_value(0));
        }
        CHECK(to_floats(sharded.parameter_value(0)) == before);
    });
}
