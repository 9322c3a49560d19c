// SPDX-License-Identifier: BSL-1.0
// ctest: MPI LIBRARIES gradsync_trainings_over_mpi gradsync_trainings RANKS 2 3 4
// The trainings of random_test.cpp that are drawn for so many processes, over MPI.
//
//   GRADSYNC_TRAININGS_SEED=7 GRADSYNC_TRAININGS_RUNS=1 mpiexec -n 3 trainings_random_mpi_test
#include <gradsync/backend/mpi.hpp>

#include "conformance/mpi_launcher.hpp"
#include "run.hpp"
#include "seeds.hpp"

using namespace gradsync;
using namespace gradsync_test;

// In a file of its own, as it takes long to compile.
extern template Trained gradsync_test::run_rank(MpiBackend, const DrawnTraining&, const Leg&);

TEST_CASE("trainings drawn at random have over MPI the bits of a training in one process") {
    check_trainings(number_of_cases(300), [](DrawnTraining t) -> std::string {
        const auto& [rank, size] = environment();
        if (!t.tcp || t.ranks != size) return {};
        t.threads = false;  // MPI_Init lets only one in
        MpiBackend comm(MPI_COMM_WORLD, {.timeout = time_limit, .shared_memory = t.shared_memory, .domain = rank / t.per_host});
        try {
            return difference(t, {run_rank(comm, t, {0, t.steps})});
        } catch (const std::exception& error) {
            comm.fail(error.what());
            throw;
        }
    });
}
