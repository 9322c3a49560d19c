#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "../core/error.hpp"

namespace gradsync::inline v0 {

/// Which rank of how many this process is, and where rank 0 is to be found: what a launcher says in the environment.
struct Job {
    int rank = 0;
    int size = 1;
    int local_rank = 0;                 ///< among the ranks of this machine: which of its devices is this rank's
    std::string address = "localhost";  ///< rank 0's machine
    std::uint16_t port = 29500;
    std::string token = {};  ///< the same on all ranks, and on no other job: keeps strangers out

    /// RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK, as torchrun and many others set them; else what mpirun sets, for programs
    /// without MPI too: OMPI_COMM_WORLD_RANK, _SIZE and _LOCAL_RANK (Open MPI; a token is made of PMIX_NAMESPACE), or PMI_RANK, PMI_SIZE and
    /// MPI_LOCALRANKID (MPICH and its kin); else what Slurm sets for the processes of `srun`: SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID.
    /// Inside Slurm mpirun's ranks and its own meet at the first of SLURM_STEP_NODELIST (or SLURM_JOB_NODELIST), with a port and a token
    /// made of SLURM_JOB_ID; elsewhere those of mpirun on this machine, unless MASTER_ADDR says where rank 0 is. MASTER_ADDR, MASTER_PORT and
    /// GRADSYNC_JOB_TOKEN override all of these. torchrun's agent listens at MASTER_PORT itself (TORCHELASTIC_USE_AGENT_STORE says so): then it is the port after
    /// it, and the token is made of TORCHELASTIC_RUN_ID and TORCHELASTIC_RESTART_COUNT. GRADSYNC_PORT overrides all ports. Without any of
    /// them: one rank. `variable(name)`: its value, or nullptr.
    ///
    /// Throws Error(invalid_argument), naming the variable.
    template <class Lookup>
    static Job from(Lookup&& variable);

    static Job from_environment() {
        return from([](const char* name) { return std::getenv(name); });
    }
};

namespace bootstrap {

/// The first host of Slurm's list: "gpu-03" of "gpu-[03-07,09],login1".
inline std::string first_host(std::string_view list) {
    const std::size_t bracket = list.find_first_of("[,");
    if (bracket == std::string_view::npos || list[bracket] == ',') return std::string(list.substr(0, bracket));
    const std::size_t first = bracket + 1, end = list.find_first_of("-,]", first), close = list.find(']', first);
    if (end == std::string_view::npos || close == std::string_view::npos) return {};
    std::string host(list.substr(0, bracket));
    host += list.substr(first, end - first);
    const std::string_view rest = list.substr(close + 1);
    host += rest.substr(0, rest.find(','));
    return host;
}

template <class Lookup>
class Variables {
public:
    explicit Variables(Lookup& lookup) noexcept : lookup_(lookup) {}

    const char* get(const char* name) const {
        const char* const value = lookup_(name);
        return value != nullptr && *value != '\0' ? value : nullptr;
    }

    /// A whole number from `least` to `most`.
    long long number(const char* name, long long least, long long most) const {
        const char* const text = get(name);
        if (text == nullptr)
            throw Error(Errc::invalid_argument, std::string("the environment variable ") + name +
                                                    " is not set; a launcher sets it for every rank, with those beside it");
        long long value = 0;
        const char* at = text;
        for (; *at >= '0' && *at <= '9' && value <= most; ++at) value = value * 10 + (*at - '0');
        if (*at != '\0' || at == text || value < least || value > most)
            throw Error(Errc::invalid_argument, std::string("the environment variable ") + name + " must be a number from " +
                                                    std::to_string(least) + " to " + std::to_string(most) + ", not '" + text + "'");
        return value;
    }
    long long number(const char* name, long long least, long long most, long long otherwise) const {
        return get(name) != nullptr ? number(name, least, most) : otherwise;
    }

private:
    Lookup& lookup_;
};

}  // namespace bootstrap

template <class Lookup>
Job Job::from(Lookup&& lookup) {
    const bootstrap::Variables variables(lookup);
    constexpr int most_ranks = 1 << 20;
    Job job;
    const bool plain = variables.get("RANK") != nullptr || variables.get("WORLD_SIZE") != nullptr;
    // In a job of Slurm's the processes of mpirun have Slurm's variables as well, those of whatever has started them.
    constexpr struct {
        const char *rank, *size, *local_rank;
    } launchers[] = {{"RANK", "WORLD_SIZE", "LOCAL_RANK"},
                     {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
                     {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
                     {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"}};
    for (const auto& names : launchers) {
        if (plain ? &names != launchers : variables.get(names.rank) == nullptr) continue;
        job.size = static_cast<int>(variables.number(names.size, 1, most_ranks));
        job.rank = static_cast<int>(variables.number(names.rank, 0, job.size - 1));
        job.local_rank = static_cast<int>(variables.number(names.local_rank, 0, job.size - 1, job.size == 1 ? 0 : job.rank));
        break;
    }
    if (const char* const name = variables.get("PMIX_NAMESPACE"); !plain && name != nullptr) job.token = std::string("mpirun ") + name;
    if (!plain && variables.get("SLURM_PROCID") != nullptr) {
        const char* const step = variables.get("SLURM_STEP_NODELIST");
        const char* const nodes = step != nullptr ? step : variables.get("SLURM_JOB_NODELIST");
        if (nodes != nullptr) job.address = bootstrap::first_host(nodes);
        if (variables.get("SLURM_JOB_ID") != nullptr) {
            const long long id = variables.number("SLURM_JOB_ID", 0, 1LL << 40);
            job.port = static_cast<std::uint16_t>(20000 + id % 20000);
            job.token = "slurm " + std::to_string(id);
            if (const char* const number = variables.get("SLURM_STEP_ID")) (job.token += '.') += number;
        }
    }
    if (const char* const address = variables.get("MASTER_ADDR")) job.address = address;
    job.port = static_cast<std::uint16_t>(variables.number("MASTER_PORT", 1, 65535, job.port));
    const char* const agent = variables.get("TORCHELASTIC_USE_AGENT_STORE");
    if (plain && agent != nullptr && std::string_view(agent) == "True") {
        job.port = static_cast<std::uint16_t>(job.port == 65535 ? 1024 : job.port + 1);
        job.token = "torchrun";
        for (const char* const name : {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"})
            if (const char* const value = variables.get(name)) (job.token += ' ') += value;
    }
    job.port = static_cast<std::uint16_t>(variables.number("GRADSYNC_PORT", 1, 65535, job.port));
    if (const char* const token = variables.get("GRADSYNC_JOB_TOKEN")) job.token = token;
    if (job.address.empty())
        throw Error(Errc::invalid_argument, "no host can be read from SLURM_JOB_NODELIST; set MASTER_ADDR to the machine of rank 0");
    return job;
}

}  // namespace gradsync::inline v0
