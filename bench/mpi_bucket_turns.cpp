// SPDX-License-Identifier: BSL-1.0
// Steps of the example trainer with buckets of several sizes, which take turns, a step each: so a machine that changes its
// state changes it for all of them. For scripts/bucket-table, which starts it on emulated hosts:
//
//     bench_mpi_bucket_turns FILE ROUNDS CHOICE... -- FLAG...
//
// CHOICE is a cap in MiB, or optimal, or none: one bucket, and no overlap. FLAGs are gradsync_train's: the model and its
// batch, the overlap. Writes into FILE a JSON object: `parameters`; by choice `seconds` of its steps (the slowest rank's,
// one a round), `exposed_seconds` and `communication_seconds` (medians of a step, of the rank where it is most),
// `bucket_bytes`; and `profile`, what the optimal buckets were planned from.

#include <gradsync/backend/mpi.hpp>  // first: it includes mpi.h without the C++ bindings

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include <nlohmann/json.hpp>

#include "make_synchroniser.hpp"
#include "mpi_ranks.hpp"
#include "options.hpp"
#include "profile_json.hpp"
#include "train_contest.hpp"

namespace {

using namespace bench;

trainer::Options flags(const std::vector<std::string>& given, int ranks) {
    std::vector<std::string> words{"bench_mpi_bucket_turns", "--backend", "mpi"};
    words.insert(words.end(), given.begin(), given.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    return trainer::parse_options(static_cast<int>(argv.size()), argv.data(), ranks);
}

trainer::Options with_buckets(trainer::Options options, const std::string& choice) {
    options.clip = 0;  // that is a collective of its own
    if (choice == "optimal") {
        options.buckets = choice;
    } else if (choice == "none") {
        options.buckets = "flat";
        options.overlap = "none";
    } else {
        options.buckets = "capped";
        char* end = nullptr;
        options.bucket_mib = std::strtod(choice.c_str(), &end);
        if (*end != '\0' || !(options.bucket_mib > 0) || !std::isfinite(options.bucket_mib))
            throw std::runtime_error("a choice is a cap in MiB, optimal, or none, not '" + choice + "'");
    }
    return options;
}

int rounds_of(const std::string& text) {
    int rounds = 0;
    const char* const end = text.data() + text.size();
    if (const auto read = std::from_chars(text.data(), end, rounds); read.ec != std::errc() || read.ptr != end || rounds < 1)
        throw std::runtime_error("ROUNDS is a whole number of at least 1, not '" + text + "'");
    return rounds;
}

/// Of `given`, by choice.
std::vector<trainer::Options> ways_of(const std::vector<std::string>& choices, const trainer::Options& given) {
    std::vector<trainer::Options> ways;
    for (auto choice = choices.begin(); choice != choices.end(); ++choice) {
        if (std::find(choices.begin(), choice, *choice) != choice)
            throw std::runtime_error("the choice " + *choice + " is there twice; its steps would be taken for those of one");
        ways.push_back(with_buckets(given, *choice));
    }
    return ways;
}

void run(const std::vector<std::string>& arguments) {
    const auto dashes = std::find(arguments.begin(), arguments.end(), "--");
    if (arguments.end() - dashes < 2 || dashes - arguments.begin() < 3)
        throw std::runtime_error("usage: bench_mpi_bucket_turns FILE ROUNDS CHOICE... -- FLAG...");
    const ContestOptions contest{.rounds = rounds_of(arguments[1])};
    const std::vector<std::string> choices(arguments.begin() + 2, dashes);
    const MpiRanks ranks;
    const trainer::Options options = flags({dashes + 1, arguments.end()}, ranks.size);
    const std::vector<trainer::Options> ways = ways_of(choices, options);

    std::vector<std::unique_ptr<Trainee>> trainees;
    trainees.push_back(make_trainee(options, ranks.rank));
    for (const trainer::Options& way : ways) {
        const gradsync::MpiBackend comm(MPI_COMM_WORLD);
        trainees[0]->learn(way, [&](trainer::Parameters& parameters, const trainer::Units& units) {
            return trainer::make_synchroniser(comm, way, parameters, units);
        });
    }
    auto steps = train_steps(choices.size(), trainees, [](int) { MPI_Barrier(MPI_COMM_WORLD); });
    const ContestResult samples = take_part(ranks.rank, pointers_to(steps), contest, slowest_of_mpi_ranks);
    trainees[0]->end();

    nlohmann::json result;
    for (std::size_t c = 0; c < choices.size(); ++c) {
        const Observed observed = trainees[0]->observed(c);
        double numbers[] = {observed.exposed_seconds, observed.communication_seconds};
        MPI_Allreduce(MPI_IN_PLACE, numbers, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        const trainer::Synchroniser& synchroniser = trainees[0]->synchroniser(c);
        nlohmann::json& own = result["choices"][choices[c]];
        own = {{"seconds", samples[c].seconds}, {"exposed_seconds", numbers[0]}, {"communication_seconds", numbers[1]}};
        for (const auto& bucket : synchroniser.statistics().buckets) own["bucket_bytes"].push_back(bucket.bytes);
        if (const trainer::BucketProfile profile = synchroniser.profile(); !profile.ready.empty())
            result["profile"] = trainer::json_of(profile);
        result["parameters"] = synchroniser.memory().parameters / sizeof(float);
    }
    if (ranks.rank == 0) {
        std::ofstream file(arguments[0]);
        if (!(file << result << std::endl)) throw std::runtime_error("cannot write " + arguments[0]);
    }
}

}  // namespace

int main(int argc, char** argv) { return main_of_mpi_helper(argc, argv, run, MPI_THREAD_MULTIPLE); }
