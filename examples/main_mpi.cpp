// gradsync_train --backend mpi: the ranks are the processes that mpirun has started, and this is one of them.

#include <gradsync/backend/mpi.hpp>  // first: it includes mpi.h without the C++ bindings

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include <gradsync/gradsync.hpp>

#include "job.hpp"
#include "ops_cpu.hpp"
#include "run_rank.hpp"

namespace gradsync_train {

namespace {

/// Runs what every rank does before the training. If it throws anywhere, the lowest rank where it does says why, and
/// all get the exit code; otherwise none.
template <class F>
std::optional<int> end_together(gs::MpiRendezvous& ranks, F&& f) {
    std::optional<Ending> ending;
    try {
        f();
    } catch (...) {
        ending = ending_of_current_exception();
    }
    constexpr int goes_on = -1;
    const auto codes = gs::bootstrap::exchange(ranks, ending ? ending->code : goes_on);
    const auto speaker = std::find_if(codes.begin(), codes.end(), [](int code) { return code != goes_on; });
    if (speaker == codes.end()) return {};
    if (speaker - codes.begin() == ranks.rank()) ending->print();
    return *speaker;
}

/// Machines that share no disk may each have a checkpoint of their own.
void expect_one_checkpoint(gs::MpiRendezvous& ranks, const Job& job) {
    const std::uint64_t digest = job.checkpoint ? job.checkpoint->digest() : 0;
    if (gs::bootstrap::exchange(ranks, digest).front() == digest) return;
    throw UsageError("--resume: rank " + std::to_string(ranks.rank()) + " finds another checkpoint (after step " +
                     std::to_string(job.checkpoint->progress().steps) + ") in " + job.options.checkpoint.string() +
                     " than rank 0; copy one of them to all machines");
}

int run(int rank, int argc, char** argv) {
    const bool speaks = rank == 0;
    std::optional<Job> job;
    std::optional<gs::MpiBackend> comm;
    try {
        gs::MpiRendezvous ranks(MPI_COMM_WORLD);
        auto code = end_together(ranks, [&] { job = prepare(parse_options(argc, argv, ranks.size()), speaks); });
        if (code) return *code;
        code = end_together(ranks, [&] { expect_one_checkpoint(ranks, *job); });
        if (code) return *code;

        comm.emplace(MPI_COMM_WORLD, gs::MpiOptions{.timeout = time_limit(job->options),
                                                    .shared_memory = !job->options.no_shared_memory,
                                                    .reproducible = job->options.reproducible});
        const Results results = run_rank(CpuOps{}, *comm, *job);
        // The others wait for what rank 0 alone does now, however long: here, where they notice if it dies.
        comm->set_timeout(std::chrono::hours(24));
        const int exit_code = speaks ? exit_code_of([&] { present(*job, results); }) : 0;
        comm->barrier().wait();
        return exit_code;
    } catch (...) {
        // This rank has failed, or has lost another one. MPI_Finalize would wait for it forever.
        const Ending ending = ending_of_current_exception();
        const std::string name = "rank " + std::to_string(rank) + ": ";  // the library's errors have it already
        std::fprintf(stderr, "gradsync_train: %s%s\n", ending.text.starts_with(name) ? "" : name.c_str(), ending.text.c_str());
        if (comm) comm->fail(ending.text);
        std::fflush(nullptr);
        std::_Exit(ending.code);
    }
}

}  // namespace

int main_over_mpi(int argc, char** argv) {
    std::signal(SIGPIPE, SIG_IGN);  // which Open MPI's TCP raises where the process at the other end has died
    int provided = 0;               // any level will do: with less than MPI_THREAD_MULTIPLE this thread alone communicates
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const int code = run(rank, argc, argv);
    MPI_Finalize();
    return code;
}

}  // namespace gradsync_train
