// SPDX-License-Identifier: BSL-1.0
// Steps of a training whose ranks are processes, for bench_train_step, which starts it under mpirun:
//
//     bench_mpi_train_step MODEL mpi|mpi_messages|tcp SECONDS LEAST ROUNDS pin|no-pin REFERENCE [STRATEGY...]
//
// Prints lines STRATEGY/WHAT NUMBER: seconds of a step, the slowest rank's, one a round, and reference, those of the
// strategy REFERENCE before and after it; and, of the rank where it is most, exposed, communication and state_bytes.

#include <gradsync/backend/mpi.hpp>  // first: it includes mpi.h without the C++ bindings
#include <gradsync/backend/tcp.hpp>
#include <gradsync/bootstrap/mpi_rendezvous.hpp>

#include <cstddef>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "mpi_ranks.hpp"
#include "train_contest.hpp"

namespace {

using namespace bench;

void run(const std::vector<std::string>& arguments) {
    if (arguments.size() < 7)
        throw std::runtime_error(
            "usage: bench_mpi_train_step MODEL mpi|mpi_messages|tcp SECONDS LEAST ROUNDS pin|no-pin "
            "REFERENCE [STRATEGY...]");
    const std::string& model = arguments[0];
    const std::string& backend = arguments[1];
    ContestOptions options = contest_options_of({arguments.begin() + 2, arguments.begin() + 6});
    options.reference = 0;
    const std::vector<std::string> names(arguments.begin() + 6, arguments.end());
    const MpiRanks ranks;

    std::vector<std::unique_ptr<Trainee>> trainees;
    trainees.push_back(make_trainee(model, ranks.rank));
    for (const std::string& name : names) {
        const Strategy& each = strategy(name);
        if (backend == "tcp") {
            gradsync::MpiRendezvous all(MPI_COMM_WORLD), one(MPI_COMM_SELF);
            learn(*trainees[0], model, each, gradsync::TcpBackend(all), gradsync::TcpBackend(one));
        } else {
            const gradsync::MpiOptions options_of_mpi{.shared_memory = backend == "mpi"};
            learn(*trainees[0], model, each, gradsync::MpiBackend(MPI_COMM_WORLD, options_of_mpi),
                  gradsync::MpiBackend(MPI_COMM_SELF, options_of_mpi));
        }
    }

    auto steps = train_steps(names.size(), trainees, [](int) { MPI_Barrier(MPI_COMM_WORLD); });
    const ContestResult samples = take_part(ranks.rank, pointers_to(steps), options, slowest_of_mpi_ranks);
    trainees[0]->end();

    std::vector<Observed> observed;
    for (std::size_t s = 0; s < names.size(); ++s) {
        observed.push_back(trainees[0]->observed(s));
        double numbers[] = {observed[s].exposed_seconds, observed[s].communication_seconds, observed[s].state_bytes};
        MPI_Allreduce(MPI_IN_PLACE, numbers, 3, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        if (ranks.rank != 0) continue;
        for (double sample : samples[s].seconds) std::printf("%s/seconds %.9e\n", names[s].c_str(), sample);
        for (double sample : samples[s].reference) std::printf("%s/reference %.9e\n", names[s].c_str(), sample);
        std::printf("%s/exposed %.9e\n", names[s].c_str(), numbers[0]);
        std::printf("%s/communication %.9e\n", names[s].c_str(), numbers[1]);
        std::printf("%s/state_bytes %.9e\n", names[s].c_str(), numbers[2]);
    }
    check_equal_losses(names, observed);
}

}  // namespace

int main(int argc, char** argv) { return main_of_mpi_helper(argc, argv, run); }
