// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdlib>

#include "../core/error.hpp"

namespace gradsync::inline v0_2 {

/// This process's rank, the number of ranks, and the address of rank 0, as a launcher sets them in the environment.
struct Job {
    int rank = 0;                       ///< this process's rank
    int size = 1;                       ///< the number of ranks
    int local_rank = 0;                 ///< among the ranks of this machine; selects this rank's device
    std::string address = "localhost";  ///< rank 0's machine
    std::uint16_t port = 29500;         ///< at which rank 0 listens
    std::string token = {};  ///< a secret that only this job's ranks know; keeps strangers out. "open": all may join
    /// The same on all ranks, different in every other job; keeps jobs apart. Need not be secret.
    std::string run_id = {};
    /// A folder or an address of etcd, through which a Membership meets again after a failure. Empty: the first
    /// failure ends the job.
    std::string store = {};
    int min_ranks = 0;  ///< an ElasticJob needs so many; 0: one
    int max_ranks = 0;  ///< it uses at most so many, and the others wait; 0: all

    /// Reads the job from environment variables. `variable(name)` returns the value, or nullptr. The first launcher
    /// whose variables are set counts:
    ///
    /// - torchrun and many others: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK.
    /// - mpirun, also for programs without MPI: OMPI_COMM_WORLD_RANK, _SIZE and _LOCAL_RANK (Open MPI; the run id is
    ///   PMIX_NAMESPACE), or PMI_RANK, PMI_SIZE and MPI_LOCALRANKID (MPICH and relatives).
    /// - srun of Slurm: SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID.
    /// - None of them: one rank.
    ///
    /// Inside Slurm, ranks meet at the first host of SLURM_STEP_NODELIST (mpirun: of SLURM_JOB_NODELIST), with a port
    /// and a run id derived from SLURM_JOB_ID. Elsewhere, mpirun's ranks meet on this machine. MASTER_ADDR and
    /// MASTER_PORT override all of these. If torchrun's agent itself listens at MASTER_PORT
    /// (TORCHELASTIC_USE_AGENT_STORE says so), the port is the next one, and the run id is derived from
    /// TORCHELASTIC_RUN_ID and TORCHELASTIC_RESTART_COUNT. GRADSYNC_PORT overrides all ports. The token is
    /// GRADSYNC_JOB_TOKEN, and the store GRADSYNC_STORE. GRADSYNC_RANKS has the numbers of ranks of an ElasticJob, as
    /// in "2:4".
    ///
    /// Throws Error(invalid_argument), which names the variable; also if MASTER_ADDR or
    /// MASTER_PORT is set without a rank.
    template <class Lookup>
    static Job from(Lookup&& variable);

    /// Returns whether the ranks meet at an address that only this machine reaches.
    bool is_at_loopback() const noexcept {
        const bool is_name = address.find_first_not_of("0123456789.") != std::string::npos;  // 127.example.com is one
        return address == "localhost" || address == "::1" || (address.starts_with("127.") && !is_name);
    }

    static Job from_environment();  ///< Reads this process's environment; see `from`.
};

namespace bootstrap {

/// The first host of Slurm's list: "gpu-03" of "gpu-[03-07,09],login1".
[[gnu::cold]] inline std::string first_host(std::string_view list) {
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

}  // namespace bootstrap

namespace detail {

/// Reads a Job; see `Job::from`. An empty variable counts as not set.
template <class Lookup>
struct JobReader {
    Lookup& lookup;
    enum Launcher { by_names, open_mpi, mpich, slurm, none } launcher = none;
    Job job = {};

    [[gnu::cold]] Job read() {
        launcher = find_launcher();
        if (launcher != none) read_ranks();
        if (launcher != none && launcher != by_names) read_scheduler();
        read_address();
        read_port("MASTER_PORT");
        if (launcher == by_names) make_way_for_agent();
        read_port("GRADSYNC_PORT");
        if (const char* const token = get("GRADSYNC_JOB_TOKEN")) job.token = token;
        if (const char* const store = get("GRADSYNC_STORE")) job.store = store;
        read_range();
        if (job.address.empty())
            raise(Errc::invalid_argument,
                  "no host can be read from SLURM_JOB_NODELIST; set MASTER_ADDR to the machine of rank 0");
        return job;
    }

    const char* get(const char* name) const {
        const char* const value = lookup(name);
        return value != nullptr && *value != '\0' ? value : nullptr;
    }
    bool has(const char* name) const { return get(name) != nullptr; }

    /// Reads a whole number from `least` to `most`.
    long long number(const char* name, long long least, long long most) const {
        const char* const digits = get(name);
        if (digits == nullptr)
            raise(Errc::invalid_argument, "the environment variable ", name,
                  " is not set; set it on every rank, with the launcher's other variables");
        long long value = 0;
        const char* at = digits;
        for (; *at >= '0' && *at <= '9' && value <= most; ++at) value = value * 10 + (*at - '0');
        if (*at != '\0' || at == digits || value < least || value > most)
            raise(Errc::invalid_argument, "the environment variable ", name, " must be a number from ", least, " to ",
                  most, ", not '", digits, "'");
        return value;
    }
    void read_port(const char* name) {
        if (has(name)) job.port = static_cast<std::uint16_t>(number(name, 1, 65535));
    }

    Launcher find_launcher() const {
        if (has("RANK") || has("WORLD_SIZE")) return by_names;
        // In a Slurm job, mpirun's processes also have Slurm's variables, namely those of the process that started
        // them. srun's processes may have some of the variables of MPICH's mpirun, but not all.
        if (has("OMPI_COMM_WORLD_RANK")) return open_mpi;
        if (has("PMI_RANK") && (has("MPI_LOCALRANKID") || !has("SLURM_PROCID"))) return mpich;
        if (has("SLURM_PROCID") && !has("SLURM_NTASKS"))  // in a batch script, outside of srun
            raise(Errc::invalid_argument, "SLURM_PROCID is set, but SLURM_NTASKS is not; ",
                  "start the program with srun, or set RANK=0 and WORLD_SIZE=1 to run a single rank");
        if (has("SLURM_PROCID")) return slurm;
        if (has("MASTER_ADDR") || has("MASTER_PORT"))
            raise(Errc::invalid_argument, "MASTER_ADDR or MASTER_PORT is set, but RANK and WORLD_SIZE are not; ",
                  "set all four on every rank, or unset both to run a single rank");
        return none;
    }

    void read_ranks() {
        constexpr struct {
            const char *rank, *size, *local_rank;
        } names_of[] = {{"RANK", "WORLD_SIZE", "LOCAL_RANK"},
                        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
                        {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
                        {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"}};
        constexpr int max_ranks = 1 << 20;
        const auto& names = names_of[launcher];
        job.size = static_cast<int>(number(names.size, 1, max_ranks));
        job.rank = static_cast<int>(number(names.rank, 0, job.size - 1));
        job.local_rank = has(names.local_rank) ? static_cast<int>(number(names.local_rank, 0, job.size - 1)) : job.rank;
    }

    /// Reads the meeting place and the run id that Slurm and mpirun imply.
    void read_scheduler() {
        // mpirun starts a step of its own on the other machines, so variables of steps differ from rank to rank.
        const char* const step = launcher == slurm ? get("SLURM_STEP_NODELIST") : nullptr;
        const char* const nodes = step != nullptr ? step : get("SLURM_JOB_NODELIST");
        if (nodes != nullptr) job.address = bootstrap::first_host(nodes);
        if (has("SLURM_JOB_ID")) {
            const long long id = number("SLURM_JOB_ID", 0, 1LL << 40);
            job.port = static_cast<std::uint16_t>(20000 + id % 20000);
            job.run_id = text("slurm ", id);
            const char* const step_id = launcher == slurm ? get("SLURM_STEP_ID") : nullptr;
            if (step_id != nullptr) (job.run_id += '.') += step_id;
        }
        const char* const name = launcher == open_mpi ? get("PMIX_NAMESPACE") : nullptr;
        if (name != nullptr) (job.run_id += job.run_id.empty() ? "mpirun " : ", mpirun ") += name;
    }

    /// Reads GRADSYNC_RANKS.
    void read_range() {
        const char* const range = get("GRADSYNC_RANKS");
        if (range == nullptr) return;
        char rest = 0;
        if (std::sscanf(range, "%7d:%7d%c", &job.min_ranks, &job.max_ranks, &rest) != 2 || job.min_ranks < 1 ||
            job.max_ranks < job.min_ranks)
            raise(Errc::invalid_argument,
                  "the environment variable GRADSYNC_RANKS must be two numbers, as in 2:4, not '", range, "'");
    }

    /// Reads MASTER_ADDR, and strips the brackets of an IPv6 address.
    void read_address() {
        std::string& address = job.address;
        if (const char* const given = get("MASTER_ADDR")) address = given;
        if (address.starts_with('[') && address.ends_with(']')) address = address.substr(1, address.size() - 2);
        const std::size_t colon = address.find(address.starts_with('[') ? "]:" : ":");
        if (colon != std::string::npos && (address.starts_with('[') || address.rfind(':') == colon))
            raise(Errc::invalid_argument, "the environment variable MASTER_ADDR must be a host without a port, not '",
                  address, "'; put the port into MASTER_PORT");
    }

    /// Takes the next port if torchrun's agent itself listens at MASTER_PORT.
    void make_way_for_agent() {
        const char* const agent = get("TORCHELASTIC_USE_AGENT_STORE");
        if (agent == nullptr || std::string_view(agent) != "True") return;
        job.port = static_cast<std::uint16_t>(job.port == 65535 ? 1024 : job.port + 1);
        job.run_id = "torchrun";
        for (const char* const name : {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"})
            if (const char* const value = get(name)) (job.run_id += ' ') += value;
    }
};

}  // namespace detail

template <class Lookup>
[[gnu::cold]] Job Job::from(Lookup&& variable) {
    return detail::JobReader<Lookup>{variable}.read();
}

#ifdef GRADSYNC_ONCE
GRADSYNC_ONCE Job Job::from_environment() {
    Job job = from([](const char* name) { return std::getenv(name); });
    detail::debug(detail::DebugLevel::info, job.rank, "the environment says: ", job.size,
                  job.size == 1 ? " rank" : " ranks", ", local rank ", job.local_rank, ", rank 0 at ", job.address,
                  " port ", job.port,
                  job.token.empty()     ? ", no token"
                  : job.token == "open" ? ", open to all"
                                        : ", a token",
                  job.run_id.empty() ? "" : ", run id ", job.run_id);
    return job;
}
#endif

}  // namespace gradsync::inline v0_2
