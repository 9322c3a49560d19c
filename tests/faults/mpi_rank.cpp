// SPDX-License-Identifier: BSL-1.0
// A rank over MPI, which mpirun starts:   faults_mpi SEED LIMIT FOLDER
#include <gradsync/backend/mpi.hpp>

#include "program.hpp"

int main(int, char** arguments) {
    using namespace faults;
    std::signal(SIGPIPE, SIG_IGN);  // see docs/guides/processes.md
    const Orders orders{plan_of(std::strtoull(arguments[1], nullptr, 10)), std::atof(arguments[2]), arguments[3]};
    note_process(orders, ::getpid());
    int level = 0, rank = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const int code = run_rank(orders, rank, [&]() -> std::optional<std::uint64_t> {
        Injector inject(orders, rank);
        if (!inject.at(Stage::before) || !inject.at(Stage::during)) return {};
        gs::MpiBackend comm(
            MPI_COMM_WORLD,
            {.timeout = orders.timeout(), .shared_memory = !orders.plan.messages, .domain = orders.plan.divided ? rank / 2 : -1});
        return train_to_the_end(comm, inject, orders);
    });
    if (code == 0) MPI_Finalize();
    std::_Exit(code);  // MPI_Finalize would wait for ranks that are lost
}
