#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "contest.hpp"

namespace bench {

/// Runs bench_mpi_all_reduce, which lies beside this program, under mpirun, and returns each contestant's samples.
inline std::map<std::string, std::vector<double>> mpi_contest(int ranks, std::size_t bytes,
                                                              const ContestOptions& options) {
    // As root, and with more ranks than cores, Open MPI starts only if told so; other MPIs ignore these. Its ranks are
    // pinned like threads are, by the contest.
    ::setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
    ::setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
    ::setenv("OMPI_MCA_rmaps_base_oversubscribe", "1", 0);
    ::setenv("OMPI_MCA_hwloc_base_binding_policy", "none", 0);
    const auto helper = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "bench_mpi_all_reduce";
    const std::string command = std::string("'" GRADSYNC_BENCH_MPIEXEC "' -n ") + std::to_string(ranks) + " '" +
                                helper.string() + "' " + std::to_string(bytes) + " " +
                                std::to_string(options.seconds) + (options.pin ? "" : " --no-pin");
    std::FILE* output = ::popen(command.c_str(), "r");
    if (output == nullptr) throw std::runtime_error("could not start mpirun");
    std::map<std::string, std::vector<double>> samples;
    char who[64];
    double sample = 0;
    while (std::fscanf(output, "%63s %lf", who, &sample) == 2) samples[who].push_back(sample);
    if (::pclose(output) != 0 || samples.empty()) throw std::runtime_error("bench_mpi_all_reduce failed under mpirun");
    return samples;
}

}  // namespace bench
