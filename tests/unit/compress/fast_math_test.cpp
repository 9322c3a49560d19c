// SPDX-License-Identifier: BSL-1.0
// Compressors in a program whose flags let the compiler think that there is neither NaN nor infinity: both reach every rank all the same.
// ctest: COMPILE_OPTIONS -ffast-math
#include <doctest/doctest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gradsync/compress/power_sgd.hpp>
#include <gradsync/compress/quantizer.hpp>
#include <gradsync/gradsync.hpp>

#include "support/ranks.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// By its bits, as comparisons are not to be trusted here.
bool is_number(float x) { return (std::bit_cast<std::uint32_t>(x) & 0x7f800000u) != 0x7f800000u; }

/// Rank 1 has a first gradient that is all of these bits; what is wrong then, or "".
template <class Exchange>
std::string wrong_after(std::uint32_t bits, const Exchange& exchange) {
    return findings(2, [&](ThreadBackend comm, Finding& finding) {
        const int rank = comm.rank();
        std::vector<float> weights(40 * 30), gradient(40 * 30);
        const std::vector<ParameterView> parameters{parameter("weights", weights, gradient, {40, 30})};
        Reducer<ThreadBackend, SizeCappedBuckets, OverlapBackward, Exchange> sync(comm, parameters, exchange);
        for (int step = 0; step < 3; ++step) {
            for (std::size_t e = 0; e < gradient.size(); ++e) gradient[e] = static_cast<float>(e % 13) - 6;
            if (step == 0 && rank == 1) gradient.assign(gradient.size(), std::bit_cast<float>(bits));
            sync.mark_ready(0);
            sync.finish();
            std::size_t count = 0;
            for (const float x : gradient) count += is_number(x) ? 1u : 0u;
            finding.check(count == (step == 0 ? 0 : gradient.size()), std::to_string(count) + " numbers in step " + std::to_string(step));
        }
    });
}

}  // namespace

TEST_CASE("fast-math: what is not finite reaches every rank at once, and is gone in the next step") {
    for (const std::uint32_t bits : {0x7fc00000u, 0x7f800000u, 0xff800000u}) {
        CHECK(wrong_after(bits, PowerSgd{.start_step = 0}) == "");
        for (const unsigned few : {8u, 4u, 1u}) CHECK(wrong_after(bits, Quantizer{.bits = few}) == "");
    }
}
