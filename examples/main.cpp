// SPDX-License-Identifier: BSL-1.0
// gradsync_train: trains a language model over bytes, data-parallel. See --help.

#include <unistd.h>

#include <filesystem>
#include <string_view>

#include <gradsync/gradsync.hpp>

#include "job.hpp"
#include "ops_cpu.hpp"
#include "run_rank.hpp"

namespace {

using namespace gradsync_train;

/// Looks ahead of the command line's own reading, for what decides who reads it.
std::string_view asked_for(std::string_view flag, int argc, char** argv) {
    std::string_view value;
    for (int i = 1; i < argc; ++i) {
        const std::string_view argument = argv[i];
        if (argument == flag && i + 1 < argc) value = argv[i + 1];
        if (argument.starts_with(flag) && argument.substr(flag.size()).starts_with('=')) value = argument.substr(flag.size() + 1);
    }
    return value;
}

/// What trains on devices is a program of its own beside this one: the libraries that it needs take a tenth of a second
/// and 200 MB, also where nobody uses them.
void become_program_for_devices(char** argv) {
    const auto program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "gradsync_train_cuda";
    ::execv(program.c_str(), argv);
    throw UsageError(
        "--device cuda: this program was built without CUDA; install the CUDA toolkit (nvcc, cuBLAS) and NCCL, "
        "then configure and build again");
}

void train_over_threads(const Job& job) {
    const auto by_rank = gs::run_threads(
        job.options.ranks, [&](gs::ThreadBackend comm) { return run_rank(CpuOps{}, comm, job); },
        gs::ThreadOptions{.timeout = time_limit(job.options)});
    present(job, by_rank[0]);
}

}  // namespace

int main(int argc, char** argv) {
    const bool on_devices = asked_for("--device", argc, argv) == "cuda";
    const std::string_view backend = asked_for("--backend", argc, argv);
    if (on_devices && train_on_devices != nullptr && backend == "nccl") return main_over_nccl(argc, argv);
#ifdef GRADSYNC_TRAIN_OVER_MPI
    // The processes of one launcher should refuse what is wrong with one voice.
    if (!on_devices && backend == "mpi") return main_over_mpi(argc, argv);
#endif
    if (!on_devices && backend == "tcp") return main_over_tcp(argc, argv);
    return exit_code_of([&] {
        if (on_devices && train_on_devices == nullptr) become_program_for_devices(argv);
        const Job job = prepare(parse_options(argc, argv));
        if (on_devices) train_on_devices(job);
        else train_over_threads(job);
    });
}
