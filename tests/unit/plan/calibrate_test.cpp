// SPDX-License-Identifier: BSL-1.0
// ctest: PROCESSORS 2
#include <gradsync/plan/calibrate.hpp>

#include <doctest/doctest.h>

#include <vector>

#include "support/ranks.hpp"

using namespace gradsync::plan;

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

TEST_CASE("what cannot be measured is refused, on every rank") {
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
