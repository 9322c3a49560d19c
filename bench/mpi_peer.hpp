#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace bench {

/// Runs bench_mpi_all_reduce, which lies beside this program, under mpirun, and returns its samples.
inline std::vector<double> mpi_samples(int ranks, std::size_t bytes, double seconds) {
    // As root, and with more ranks than cores, Open MPI starts only if told so; other MPIs ignore these.
    ::setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
    ::setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
    ::setenv("OMPI_MCA_rmaps_base_oversubscribe", "1", 0);
    const auto helper = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "bench_mpi_all_reduce";
    const std::string command = std::string("'" GRADSYNC_BENCH_MPIEXEC "' -n ") + std::to_string(ranks) + " '" +
                                helper.string() + "' " + std::to_string(bytes) + " " + std::to_string(seconds);
    std::FILE* output = ::popen(command.c_str(), "r");
    if (output == nullptr) throw std::runtime_error("could not start mpirun");
    std::vector<double> samples;
    double sample = 0;
    while (std::fscanf(output, "%lf", &sample) == 1) samples.push_back(sample);
    if (::pclose(output) != 0 || samples.empty()) throw std::runtime_error("bench_mpi_all_reduce failed under mpirun");
    return samples;
}

}  // namespace bench
