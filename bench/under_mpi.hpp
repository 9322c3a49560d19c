// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "contest.hpp"

namespace bench {

/// The numbers that a program printed, by name: a line holds a name and a number. Other lines are skipped; some libraries print them.
using Printed = std::map<std::string, std::vector<double>>;

/// Returns the path of a helper program, which stands beside this one.
inline std::string path_of_helper(const std::string& helper) {
    return std::filesystem::read_symlink("/proc/self/exe").parent_path() / helper;
}

/// The shell's command that runs a helper program as `ranks` processes under `mpiexec`.
inline std::string command_under_mpi(const std::string& mpiexec, int ranks, const std::string& helper, const std::string& arguments) {
    // As root, and with more ranks than cores, Open MPI starts only if told so; other MPIs ignore these. Its ranks are
    // pinned like threads are, by the contest.
    ::setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
    ::setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
    ::setenv("OMPI_MCA_rmaps_base_oversubscribe", "1", 0);
    ::setenv("OMPI_MCA_hwloc_base_binding_policy", "none", 0);
    return "'" + mpiexec + "' -n " + std::to_string(ranks) + " '" + path_of_helper(helper) + "' " + arguments;
}

/// Runs a shell command and returns what it printed. Throws std::runtime_error if it fails or prints no number.
inline Printed printed_by(const std::string& command) {
    std::FILE* output = ::popen(command.c_str(), "r");
    if (output == nullptr) throw std::runtime_error("could not start " + command);
    Printed printed;
    char line[512], word[64], more = 0;
    double number = 0;
    while (std::fgets(line, sizeof line, output) != nullptr)
        if (std::sscanf(line, "%63s %lf %c", word, &number, &more) == 2) printed[word].push_back(number);
    if (::pclose(output) != 0 || printed.empty()) throw std::runtime_error("this command failed: " + command);
    return printed;
}

/// Runs a helper program.
inline Printed run_under_mpi(const std::string& mpiexec, int ranks, const std::string& helper, const std::string& arguments) {
    return printed_by(command_under_mpi(mpiexec, ranks, helper, arguments));
}

/// What a helper program is told of the contest.
inline std::string arguments_of(const ContestOptions& options) {
    return std::to_string(options.seconds) + " " + std::to_string(options.least_rounds) + " " + std::to_string(options.rounds) +
           (options.pin ? " pin" : " no-pin");
}

}  // namespace bench
