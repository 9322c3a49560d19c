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

/// Goes on as the program `name` beside this one. Throws UsageError, which says `remedy`, if it is not there.
[[noreturn]] void become(const char* name, char** argv, const char* remedy) {
    const auto program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / name;
    ::execv(program.c_str(), argv);
    throw UsageError(remedy);
}

/// The libraries that training on devices needs take a tenth of a second and 200 MB, also where nobody uses them.
[[noreturn]] void become_program_for_devices(char** argv) {
    become("gradsync_train_cuda", argv,
           "--device cuda: this program was built without CUDA; install the CUDA toolkit (nvcc, cuBLAS) and NCCL, "
           "then configure and build again");
}

/// The backends for processes take as long to compile as all the rest.
[[noreturn]] void become_program_for_processes(char** argv) {
    become("gradsync_train_processes", argv,
           "--backend tcp and mpi need the program gradsync_train_processes beside this one; build it: "
           "cmake --build --preset release --target gradsync_train_processes");
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
    // The processes of one launcher should refuse what is wrong with one voice.
    const bool over_processes = !on_devices && (backend == "mpi" || backend == "tcp");
    if (over_processes && backend == "mpi" && main_over_mpi != nullptr) return main_over_mpi(argc, argv);
    if (over_processes && backend == "tcp" && main_over_tcp != nullptr) return main_over_tcp(argc, argv);
    return exit_code_of([&] {
        if (on_devices && train_on_devices == nullptr) become_program_for_devices(argv);
        if (over_processes && main_over_tcp == nullptr) become_program_for_processes(argv);
        const Job job = prepare(parse_options(argc, argv));
        if (on_devices) train_on_devices(job);
        else train_over_threads(job);
    });
}
