// gradsync_train: trains a language model over bytes, data-parallel. See --help.

#include <string_view>

#include <gradsync/gradsync.hpp>

#include "job.hpp"
#include "ops_cpu.hpp"
#include "run_rank.hpp"

namespace {

using namespace gradsync_train;

/// Looks ahead of the command line's own reading: the processes of one mpirun should refuse it with one voice.
[[maybe_unused]] bool asks_for_mpi(int argc, char** argv) {
    std::string_view backend;
    for (int i = 1; i < argc; ++i) {
        const std::string_view argument = argv[i];
        if (argument == "--backend" && i + 1 < argc) backend = argv[i + 1];
        if (argument.starts_with("--backend=")) backend = argument.substr(argument.find('=') + 1);
    }
    return backend == "mpi";
}

void train_over_threads(const Job& job) {
    const auto by_rank = gs::run_threads(
        job.options.ranks, [&](gs::ThreadBackend comm) { return run_rank(CpuOps{}, comm, job); },
        gs::ThreadOptions{.timeout = time_limit(job.options)});
    present(job, by_rank[0]);
}

}  // namespace

int main(int argc, char** argv) {
#ifdef GRADSYNC_TRAIN_OVER_MPI
    if (asks_for_mpi(argc, argv)) return main_over_mpi(argc, argv);
#endif
    return exit_code_of([&] { train_over_threads(prepare(parse_options(argc, argv))); });
}
