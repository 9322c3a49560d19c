// SPDX-License-Identifier: BSL-1.0
// ctest: ALONE TIMEOUT 900 COST 60 COMPILE_OPTIONS -O2 NOT_WITH thread
// Elastic jobs that are simulated, each drawn from a seed.
//
//   GRADSYNC_SIMULATION_SEED=7 GRADSYNC_SIMULATION_RUNS=1 unit_elastic_simulation_test --test-case="simulated jobs*"
//
// A single run says what each process does. GRADSYNC_SIMULATION_DEPTH=16 searches further. scripts/faults --simulated runs many seeds.
#include "simulated_process.hpp"
#include "support/slow_build.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>
#include <unordered_map>
#include <vector>

using namespace gradsync_test::simulated;

namespace {

std::uint64_t number_of(const char* variable, std::uint64_t otherwise) {
    const char* const text = std::getenv(variable);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

/// Takes all paths of a small job, each to its end.
struct Search {
    std::uint64_t paths = 0;
    std::unordered_map<std::uint64_t, std::uint64_t> states = {};
    std::string violation = {};

    void run(std::uint64_t from, std::uint64_t depth, int kills, bool is_sharded) {
        states.clear();
        std::vector<std::vector<int>> left{{}};
        while (!left.empty() && violation.empty()) {
            Script script{
                .from = from, .depth = depth, .kills = kills, .is_sharded = is_sharded, .seen = &states, .choices = std::move(left.back())};
            left.pop_back();
            const std::size_t known = script.choices.size();
            violation = Simulation(0, Bug::none, &script).run().violation;
            ++paths;
            for (std::size_t i = known; i < script.choices.size(); ++i)
                for (int other = 1; other < script.widths[i]; ++other) {
                    left.emplace_back(script.choices.begin(), script.choices.begin() + static_cast<std::ptrdiff_t>(i));
                    left.back().push_back(other);
                }
        }
    }
};

}  // namespace

TEST_CASE("simulated jobs break no rule") {
    const std::uint64_t first = number_of("GRADSYNC_SIMULATION_SEED", 0),
                        runs = number_of("GRADSYNC_SIMULATION_RUNS", gradsync_test::number_of_cases(10'000));
    Result sum;
    std::uint64_t violations = 0, well = 0, lost = 0;
    for (std::uint64_t seed = first; seed < first + runs; ++seed) {
        Simulation job(seed);
        if (runs == 1) job.log = &std::cout;
        const Result one = job.run();
        if (!one.violation.empty()) {
            ++violations;
            MESSAGE("seed ", seed, ": ", one.violation);
        }
        if (one.calm > sum.calm) sum.calm = one.calm;
        well += one.ended_well;
        lost += one.lost;
        sum.kills += one.kills;
        sum.stops += one.stops;
        sum.cuts += one.cuts;
        sum.generations += one.generations;
        sum.commits += one.commits;
    }
    std::cout << "seeds " << first << " to " << first + runs - 1 << '\n'
              << runs << " runs, " << violations << " violations, " << well << " ended well, " << lost << " lost their state, " << sum.kills
              << " kills, " << sum.generations << " generations\n";
    MESSAGE("at most ", sum.calm / ms, " ms after the last fault");
    CHECK(violations == 0);
    if (runs < 1000) return;
    CHECK(well > runs / 2);
    CHECK(lost < runs / 2);
    CHECK(sum.kills > runs);
    CHECK(sum.stops > runs / 2);
    CHECK(sum.cuts > runs / 10);
    CHECK(sum.generations > 2 * runs);
}

TEST_CASE("each of twelve planted bugs is found within 10,000 seeds") {
    struct Planted {
        Bug bug;
        std::string name, rule;
    };
    for (const Planted& planted : {Planted{Bug::names_collected, "names collected", "1:"},
                                   {Bug::healing_in_place, "healing in place", "5:"},
                                   {Bug::unreaped_writer, "an unreaped writer", "6:"},
                                   {Bug::stale_proposal, "a proposal from a stale read taken as agreed", "1:"},
                                   {Bug::early_commit, "a commit before the weights are stepped", "3:"},
                                   {Bug::torn_offer, "a torn state offered", "3:"},
                                   {Bug::two_places, "two places where three are needed", "5:"},
                                   {Bug::early_vote, "a vote read in its own step", "2:"},
                                   {Bug::silent_joiner, "a joiner counted before it has answered", "9:"},
                                   {Bug::hasty_minority, "a minority that does not wait", "10:"},
                                   {Bug::late_begun, "begun written late", "4:"},
                                   {Bug::replaced_manifest, "a checkpoint's manifest replaced by an older one", "4:"}}) {
        std::string found;
        std::uint64_t seed = 0;
        while (found.empty() && seed < 10'000) found = Simulation(seed++, planted.bug).run().violation;
        MESSAGE(planted.name, ": seed ", seed - 1, ": ", found);
        CHECK(found.starts_with(planted.rule));
    }
}

TEST_CASE("three members break no rule in whatever order things happen, and whichever of them dies") {
    const std::uint64_t depth = number_of("GRADSYNC_SIMULATION_DEPTH", gradsync_test::slow_build ? 9 : 12);
    for (const bool is_sharded : {false, true})
        for (const std::uint64_t from : {0u, 30u, 60u}) {
            if (is_sharded && from == 0) continue;  // the ranks meet as they do without shards
            Search search;
            search.run(from, depth, 1, is_sharded);
            MESSAGE(std::string(is_sharded ? "with shards, events " : "events "), from + 1, " to ", from + depth, ": ",
                    search.states.size(), " states, ", search.paths, " paths");
            CHECK(search.violation == "");
            CHECK(search.states.size() > 1000);
        }
}
