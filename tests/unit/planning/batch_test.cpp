// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/planning/batch.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <string>

#include "support/ranks.hpp"

using namespace gradsync::plan;

namespace {

const BatchChoice* choice(const BatchPlan& plan, BatchRounding rounding) {
    for (const BatchChoice& c : plan.choices)
        if (c.rounding == rounding) return &c;
    return nullptr;
}

}  // namespace

TEST_CASE("plan_batch: four million tokens need 500 devices, or 3.90625 accumulations on 128") {
    const BatchPlan plan = plan_batch({.global_tokens = 4'000'000, .sequence = 4000, .micro_batch = 2, .devices = 128});
    CHECK(plan.samples == 1000);
    CHECK(plan.accumulate_exact == 3.90625);
    CHECK(plan.devices_for_no_accumulation == 500);
    CHECK(plan.devices_for_no_accumulation_exact == 500);
    CHECK(!plan.more_devices_than_work);

    const BatchChoice* more = choice(plan, BatchRounding::more_steps);
    REQUIRE(more);
    CHECK(more->accumulate == 4);
    CHECK(more->samples == 1024);
    CHECK(more->tokens == 4'096'000);
    CHECK(more->relative_error == doctest::Approx(0.024));
    const BatchChoice* fewer = choice(plan, BatchRounding::fewer_steps);
    REQUIRE(fewer);
    CHECK(fewer->accumulate == 3);
    CHECK(fewer->samples == 768);
    const BatchChoice* uneven = choice(plan, BatchRounding::uneven_steps);
    REQUIRE(uneven);
    CHECK(uneven->samples == 1000);
    CHECK(uneven->devices_with_one_less == 12);  // 116 x 4 + 12 x 3 = 500 micro-batches
    const BatchChoice* idle = choice(plan, BatchRounding::fewer_devices);
    REQUIRE(idle);
    CHECK(idle->devices == 125);
    CHECK(idle->accumulate == 4);
    CHECK(idle->samples == 1000);
}

TEST_CASE("plan_batch says if there are more devices than work") {
    const BatchPlan plan = plan_batch({.global_tokens = 32, .micro_batch = 2, .devices = 32});
    CHECK(plan.accumulate_exact == 0.5);
    CHECK(plan.more_devices_than_work);
    CHECK(plan.devices_for_no_accumulation == 16);
    CHECK(choice(plan, BatchRounding::fewer_steps) == nullptr);
    REQUIRE(choice(plan, BatchRounding::fewer_devices));
    CHECK(choice(plan, BatchRounding::fewer_devices)->devices == 16);
    REQUIRE(choice(plan, BatchRounding::more_steps));
    CHECK(choice(plan, BatchRounding::more_steps)->samples == 64);
    REQUIRE(choice(plan, BatchRounding::smaller_micro_batch));
    CHECK(choice(plan, BatchRounding::smaller_micro_batch)->micro_batch == 1);
}

TEST_CASE("plan_batch does not round what divides") {
    const BatchPlan plan = plan_batch({.global_tokens = 4'096'000, .sequence = 4000, .micro_batch = 2, .devices = 128});
    REQUIRE(plan.choices.size() == 1);
    CHECK(plan.choices[0].rounding == BatchRounding::none);
    CHECK(plan.choices[0].accumulate == 4);
    CHECK(plan.choices[0].relative_error == 0);
}

TEST_CASE("plan_batch: every choice adds up, and keeps what it says, for random targets") {
    std::mt19937_64 random(5);
    const auto up_to = [&](std::uint64_t n) { return random() % n + 1; };
    for (int i = 0; i < 20'000; ++i) {
        const BatchTarget target{up_to(100'000), up_to(40), up_to(9), up_to(200)};
        const BatchPlan plan = plan_batch(target);
        REQUIRE(!plan.choices.empty());
        double last = 0;
        for (const BatchChoice& c : plan.choices) {
            INFO("tokens ", target.global_tokens, ", sequence ", target.sequence, ", micro-batch ", target.micro_batch, ", devices ",
                 target.devices, ": ", std::string(name_of(c.rounding)));
            std::uint64_t samples = 0;
            for (std::uint64_t d = 0; d < c.devices; ++d) samples += c.micro_batch * (c.accumulate - (d < c.devices_with_one_less));
            REQUIRE(c.samples == samples);
            REQUIRE(c.tokens == samples * target.sequence);
            REQUIRE(c.devices <= target.devices);
            REQUIRE(c.micro_batch <= target.micro_batch);
            REQUIRE(c.accumulate >= 1);
            REQUIRE((c.devices_with_one_less == 0 || c.accumulate > 1));
            REQUIRE((c.micro_batch == target.micro_batch || c.rounding == BatchRounding::smaller_micro_batch));
            REQUIRE((c.devices == target.devices || c.rounding == BatchRounding::fewer_devices));
            if (c.rounding == BatchRounding::none || c.rounding == BatchRounding::uneven_steps ||
                c.rounding == BatchRounding::smaller_micro_batch)
                REQUIRE(c.tokens == target.global_tokens);
            if (c.rounding == BatchRounding::fewer_steps) REQUIRE(c.tokens < target.global_tokens);
            if (c.rounding == BatchRounding::more_steps) {
                REQUIRE(c.tokens > target.global_tokens);
                REQUIRE(c.tokens - c.micro_batch * c.devices * target.sequence < target.global_tokens);  // one less is too few
            }
            const double off = c.relative_error < 0 ? -c.relative_error : c.relative_error;
            REQUIRE(off >= last);  // the nearest first
            last = off;
        }
    }
}

TEST_CASE("plan_batch refuses an invalid batch in a sentence") {
    using gradsync_test::outcome_of;
    const BatchTarget good{.global_tokens = 1000, .sequence = 10, .micro_batch = 2, .devices = 4};
    const auto refused = [&](const char* words, auto change) {
        BatchTarget target = good;
        change(target);
        const auto outcome = outcome_of([&] { plan_batch(target); });
        CHECK(outcome.is(gradsync::Errc::invalid_argument));
        CHECK_MESSAGE(outcome.says(words), outcome.text);
    };
    refused("tokens is 0", [](BatchTarget& t) { t.global_tokens = 0; });
    refused("sequence length is 0", [](BatchTarget& t) { t.sequence = 0; });
    refused("micro-batch is 0", [](BatchTarget& t) { t.micro_batch = 0; });
    refused("devices is 0", [](BatchTarget& t) { t.devices = 0; });
    refused("64 bits", [](BatchTarget& t) { t.sequence = t.devices = std::uint64_t{1} << 40; });
    refused("64 bits", [](BatchTarget& t) { t.global_tokens = std::numeric_limits<std::uint64_t>::max(); });
}

TEST_CASE("find_micro_batch finds the largest that fits, and never tries beyond one that did not") {
    for (std::uint64_t limit = 1; limit <= 70; ++limit)
        for (std::uint64_t fits = 0; fits <= limit + 2; ++fits) {
            std::uint64_t failed = ~std::uint64_t{0};
            int tries = 0;
            const std::uint64_t found = find_micro_batch(
                [&](std::uint64_t m) {
                    ++tries;
                    REQUIRE(m >= 1);
                    REQUIRE(m <= limit);
                    REQUIRE(m < failed);
                    if (m > fits) failed = m;
                    return m <= fits;
                },
                limit);
            REQUIRE(found == (fits < limit ? fits : limit));
            REQUIRE(tries <= 14);
        }
    CHECK(find_micro_batch([](std::uint64_t m) { return m <= 99; }, std::numeric_limits<std::uint64_t>::max()) == 99);
}
