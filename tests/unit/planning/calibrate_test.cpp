// SPDX-License-Identifier: BSL-1.0
#include <gradsync/planning/calibrate.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <vector>

#include "support/ranks.hpp"

using namespace gradsync::plan;

namespace {

double relative_squares(CallCost cost, const std::vector<TimedCall>& calls) {
    double sum = 0;
    for (const TimedCall& c : calls) sum += std::pow(cost.seconds(c.bytes) / c.seconds - 1, 2);
    return sum;
}

}  // namespace

TEST_CASE("all ranks get the same numbers, made of the same calls") {
    std::vector<Fit> fits(3);
    const auto finding = gradsync_test::findings(3, [&](gradsync::ThreadBackend backend, gradsync_test::Finding&) {
        fits[static_cast<std::size_t>(backend.rank())] = calibrate(backend, {.max_bytes = 1 << 20, .warm_up = 1, .bursts = 3});
    });
    CHECK(finding == "");
    CHECK(fits[0].calls.size() == 6);  // 1 KiB to 1 MiB
    CHECK(fits[0].calls.back().bytes == 1 << 20);
    CHECK(fits[0].cost.per_byte + fits[0].cost.fixed > 0);
    for (const Fit& other : fits) {
        CHECK(other.cost == fits[0].cost);
        CHECK(other.residuals == fits[0].residuals);
    }
}

TEST_CASE("calibrate refuses what cannot be measured, on every rank") {
    const auto refused = [](int size, CalibrationOptions options, const char* words) {
        for (const auto& outcome : gradsync_test::outcomes(size, [&](gradsync::ThreadBackend backend) { calibrate(backend, options); })) {
            CHECK(outcome.is(gradsync::Errc::invalid_argument));
            CHECK_MESSAGE(outcome.says(words), outcome.text);
        }
    };
    refused(1, {}, "at least 2");
    refused(2, {.min_bytes = 1000, .max_bytes = 2000}, "max_bytes");
    refused(2, {.bursts = 0}, "bursts");
}

TEST_CASE("fit finds a line again") {
    const CallCost truth{40e-6, 1.6e-9};
    std::vector<TimedCall> calls;
    for (double bytes = 1024; bytes < 1e8; bytes *= 4) calls.push_back({bytes, truth.seconds(bytes)});
    const Fit found = fit(calls);
    CHECK(found.cost.fixed == doctest::Approx(truth.fixed));
    CHECK(found.cost.per_byte == doctest::Approx(truth.per_byte));
    CHECK(found.worst_residual < 1e-9);
    CHECK(found.residuals.size() == calls.size());
}

TEST_CASE("noisy lines: no other line, with numbers of 0 or more, has smaller residuals") {
    std::mt19937_64 random(3);
    std::uniform_real_distribution<double> noise(0.5, 1.5), scale(-3, 3);
    int at_a_limit = 0;
    for (int repeat = 0; repeat < 2000; ++repeat) {
        const CallCost truth{1e-5 * std::pow(10, scale(random)), 1e-9};
        std::vector<TimedCall> calls;
        for (double bytes = 1000; bytes < 1e7; bytes *= 5) calls.push_back({bytes, truth.seconds(bytes) * noise(random)});
        const Fit found = fit(calls);
        REQUIRE(found.cost.fixed >= 0);
        REQUIRE(found.cost.per_byte >= 0);
        at_a_limit += found.cost.fixed == 0;
        const double least = relative_squares(found.cost, calls);
        REQUIRE(found.rms_residual == doctest::Approx(std::sqrt(least / static_cast<double>(calls.size()))));
        for (const double a : {-1e-3, 0.0, 1e-3})
            for (const double b : {-1e-3, 0.0, 1e-3}) {
                const CallCost other{found.cost.fixed * (1 + a) + (found.cost.fixed == 0 && a > 0 ? 1e-9 : 0),
                                     found.cost.per_byte * (1 + b)};
                REQUIRE(relative_squares(other, calls) >= least * (1 - 1e-9));
            }
    }
    CHECK(at_a_limit > 0);
}

TEST_CASE("fit refuses what is no line") {
    const auto refused = [](const char* words, std::vector<TimedCall> calls) {
        const auto outcome = gradsync_test::outcome_of([&] { fit(calls); });
        CHECK_MESSAGE(outcome.says(words), outcome.text);
    };
    refused("two sizes", {});
    refused("two sizes", {{1000, 1e-3}});
    refused("two sizes", {{1000, 1e-3}, {1000, 2e-3}});
    refused("positive, finite", {{1000, 1e-3}, {2000, 0}});
}
