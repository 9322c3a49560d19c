// SPDX-License-Identifier: BSL-1.0
#pragma once
// What the programs that run under mpirun have in common.

#include <mpi.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "contest.hpp"

namespace bench {

struct MpiRanks {
    MpiRanks() {
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &size);
    }
    int rank = 0;
    int size = 1;
};

/// The most of what the ranks say. It sleeps until all have: MPI would spin.
inline double slowest_of_mpi_ranks(double seconds) {
    MPI_Request request;
    MPI_Iallreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD, &request);
    for (int all = 0;; std::this_thread::sleep_for(std::chrono::microseconds(50))) {
        MPI_Test(&request, &all, MPI_STATUS_IGNORE);
        if (all) return seconds;
    }
}

/// From what `arguments_of` made of them.
inline ContestOptions contest_options_of(const std::vector<std::string>& arguments) {
    ContestOptions options;
    options.seconds = std::strtod(arguments.at(0).c_str(), nullptr);
    options.least_rounds = std::atoi(arguments.at(1).c_str());
    options.rounds = std::atoi(arguments.at(2).c_str());
    options.pin = arguments.at(3) == "pin";
    return options;
}

/// The whole of a helper program; `run` is given its arguments.
template <class Run>
int main_of_mpi_helper(int argc, char** argv, Run&& run, int thread_level = MPI_THREAD_SINGLE) {
    int provided = thread_level;
    MPI_Init_thread(&argc, &argv, thread_level, &provided);
    try {
        run(std::vector<std::string>(argv + 1, argv + argc));
    } catch (const std::exception& e) {
        std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
        std::fflush(nullptr);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Finalize();
    return 0;
}

}  // namespace bench
