// SPDX-License-Identifier: BSL-1.0
// The library's collectives against the bandwidth limit and against its peers.
//
//     bench_all_reduce [--seconds=S] [--rounds=N] [--no-pin] [--peer=NAME=COMMAND]... [Google Benchmark's flags]
//     bench_all_reduce --backend threads|tcp|mpi [--ranks N] ...     one backend in nccl-tests' columns: see --backend tcp --help
//
// Benchmarks are named WHO/COLLECTIVE/DTYPE/ranks:N/bytes:B. WHO is of the library
//
//     threads                   ThreadBackend
//     mpi                       MpiBackend, ranks that share memory, on buffers that it has allocated
//     mpi_adopted               the same on memory that the program has mapped, and gs::adopt has moved
//     mpi_borrowed              the same on ordinary memory
//     mpi_messages              MpiBackend, ranks that send messages, on buffers that it has allocated
//     tcp_messages              TcpBackend, likewise, over the loopback interface, in turns with Gloo
//
// and else
//
//     limit                     a bare loop: see limit_loop.hpp
//     gloo                      Gloo, where it was found at build time
//     mpi_library               the MPI library's own, where it was found (MPI_Allreduce, MPI_Bcast, ...)
//     mpi_library_nonblocking   its MPI_Iallreduce and MPI_Wait
//     NAME                      of each --peer: another program, see bench/peers
//
// Times are medians. Counters: bytes; algbw and busbw, bytes a second as nccl-tests counts them; WHO_ratio, that one's
// time over this one's, measured in turns with it; time_min and time_max in seconds; handoff_ns, the state of the
// machine. Turns are batches; but a --peer, which has processes of its own, takes turns of half of its time with the limit.
//
// The shell runs COMMAND, with {ranks} replaced by their number and BYTES SECONDS LEAST ROUNDS pin|no-pin appended. It
// prints a line a sample, NAME and the seconds for one all-reduce of floats, in place: the slowest rank's.

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "buffers.hpp"
#include "collectives.hpp"
#include "flags.hpp"
#include "limit_loop.hpp"
#include "reporting.hpp"
#include "shared_contests.hpp"
#include "tcp_collective.hpp"
#if GRADSYNC_BENCH_GLOO
#include "gloo_all_reduce.hpp"
#endif
#include "under_mpi.hpp"
#if GRADSYNC_BENCH_TOOL
#include "all_reduce_tool.hpp"
#endif

namespace {

using namespace bench;
using gradsync::DType;

ContestOptions contest_options;

struct Case {
    std::string collective;
    DType dtype = DType::f32;
    int ranks = 2;
    std::size_t bytes = 0;

    std::string name() const {
        return collective + "/" + std::string(gradsync::name_of(dtype)) + "/ranks:" + std::to_string(ranks) +
               "/bytes:" + std::to_string(bytes);
    }
    bool sums() const { return collective == "all_reduce"; }
    bool has_limit() const { return sums() && LimitLoop::supports(ranks); }
};

/// What came out of a contest.
struct Measured {
    std::map<std::string, Summary> of;  ///< by contestant
    double handoff = 0;
};

void append(std::vector<double>& to, const std::vector<double>& values) { to.insert(to.end(), values.begin(), values.end()); }

/// Runs these in turns with the limit; whoever made them has checked their sums.
Measured against_limit(const Case& c, Buffers& buffers, std::vector<std::pair<std::string, Contestant*>> all) {
    LimitLoop limit(buffers.pointers(), c.bytes);
    if (c.has_limit()) {
        buffers.check_sum(limit, DType::f32, "limit");
        all.emplace_back("limit", &limit);
    }
    std::vector<Contestant*> contestants;
    for (const auto& [who, contestant] : all) contestants.push_back(contestant);
    const double before = handoff_latency();
    const ContestResult samples = run_contest(c.ranks, contestants, contest_options);
    Measured measured{{}, (before + handoff_latency()) / 2};
    for (std::size_t i = 0; i < all.size(); ++i) measured.of[all[i].first] = summarise(samples[i].seconds);
    return measured;
}

Measured measure_threads(const Case& c) {
    Buffers buffers(c.ranks, c.bytes);
    ThreadsCollective threads(c.collective, c.dtype, buffers.pointers(), c.bytes);
    if (c.sums()) buffers.check_sum(threads, c.dtype, "threads");
    return against_limit(c, buffers, {{"threads", &threads}});
}

Measured measure_tcp(const Case& c) {
    Buffers buffers(c.ranks, c.bytes);
    TcpCollective tcp(c.collective, c.dtype, c.ranks, c.bytes);
    tcp.check_sum();
#if GRADSYNC_BENCH_GLOO
    GlooAllReduce gloo(buffers.pointers(), c.bytes);
    buffers.check_sum(gloo, c.dtype, "gloo");
    return against_limit(c, buffers, {{"tcp_messages", &tcp}, {"gloo", &gloo}});
#else
    return against_limit(c, buffers, {{"tcp_messages", &tcp}});
#endif
}

#ifdef GRADSYNC_BENCH_MPIEXEC
Measured measure_mpi(const Case& c) {
    const double before = handoff_latency();
    ContestOptions options = contest_options;
    options.seconds *= 3;  // there are seven of them
    options.least_rounds = 7;
    const Printed samples = run_under_mpi(
        GRADSYNC_BENCH_MPIEXEC, c.ranks, "bench_mpi_collective",
        c.collective + " " + std::string(gradsync::name_of(c.dtype)) + " " + std::to_string(c.bytes) + " " + arguments_of(options));
    Measured measured{{}, (before + handoff_latency()) / 2};
    for (const auto& [who, seconds] : samples) measured.of[who] = summarise(seconds);
    return measured;
}
#endif

/// Another program that all-reduces floats.
struct Peer {
    std::string name, command;
};
std::vector<Peer> peers;

Measured measure_peer(const Case& c, const Peer& peer) {
    constexpr int turns = 2;
    ContestOptions options = contest_options;
    options.seconds /= turns;
    options.least_rounds = 3;
    std::string command = peer.command;
    constexpr std::string_view place = "{ranks}";
    for (std::size_t at; (at = command.find(place)) != command.npos;) command.replace(at, place.size(), std::to_string(c.ranks));
    command += " " + std::to_string(c.bytes) + " " + arguments_of(options);
    const double before = handoff_latency();
    Printed samples;
    for (int turn = 0; turn <= turns; ++turn) {
        Buffers buffers(c.ranks, c.bytes);
        LimitLoop limit(buffers.pointers(), c.bytes);
        Contestant* const contestants[] = {&limit};
        append(samples["limit"], run_contest(c.ranks, contestants, options)[0].seconds);
        if (turn == turns) break;
        append(samples[peer.name], printed_by(command)[peer.name]);
        if (samples[peer.name].empty()) throw std::runtime_error("it printed no line '" + peer.name + " SECONDS': " + command);
    }
    Measured measured{{}, (before + handoff_latency()) / 2};
    for (const auto& [who, seconds] : samples) measured.of[who] = summarise(seconds);
    return measured;
}

void report_case(benchmark::State& state, const Case& c, const std::string& who, const Measured& measured) {
    const Summary& own = measured.of.at(who);
    report(state, own, measured.handoff);
    const double bandwidth = static_cast<double>(c.bytes) / own.median;
    state.counters["bytes"] = static_cast<double>(c.bytes);
    state.counters["algbw"] = bandwidth;
    state.counters["busbw"] = bandwidth * bus_factor(c.collective, c.ranks);
    const auto other = [&](const std::string& name) {
        const auto found = measured.of.find(name);
        return found == measured.of.end() || name == who ? nullptr : &found->second;
    };
    for (const char* name : {"limit", "threads", "mpi_library", "gloo"})
        if (other(name)) state.counters[name + std::string("_ratio")] = other(name)->median / own.median;
}

SharedContests<Measured> shared_contests;

/// A benchmark for each of the contestants in what `measure` runs.
template <class Measure>
void add(const std::vector<std::string>& contestants, const Case& c, Measure measure) {
    for (const std::string& who : contestants)
        add_benchmark(who + "/" + c.name(), benchmark::kMicrosecond, [=](benchmark::State& state) {
            const auto run = [&] { return measure(c); };
            report_case(state, c, who, shared_contests.take(contestants[0] + "/" + c.name(), contestants, who, run));
        });
}

void add_threads(const Case& c) {
    if (c.has_limit()) add({"threads", "limit"}, c, measure_threads);
    else add({"threads"}, c, measure_threads);
}

void add_mpi([[maybe_unused]] const Case& c) {
#ifdef GRADSYNC_BENCH_MPIEXEC
    std::vector<std::string> contestants{"mpi", "mpi_messages"};
    if (c.bytes != 0) contestants.insert(contestants.end(), {"mpi_adopted", "mpi_borrowed"});
    if (!gradsync::is_low_precision(c.dtype)) {
        contestants.push_back("mpi_library");
        if (c.sums()) contestants.push_back("mpi_library_nonblocking");
    }
    add(contestants, c, measure_mpi);
#endif
}

/// All-reduces of f32, which is what all peers have.
void add_peers(const Case& c) {
#if GRADSYNC_BENCH_GLOO
    add({"tcp_messages", "gloo"}, c, measure_tcp);
#else
    add({"tcp_messages"}, c, measure_tcp);
#endif
    for (const Peer& peer : peers) add({peer.name}, c, [peer](const Case& each) { return measure_peer(each, peer); });
}

void add_all() {
    constexpr std::size_t mib = std::size_t{1} << 20;
    for (int ranks : {1, 2, 4, 6}) {
        for (std::size_t bytes : {std::size_t{4096}, std::size_t{65536}, mib, 10 * mib, 25 * mib, 100 * mib}) {
            const Case c{"all_reduce", DType::f32, ranks, bytes};
            add_threads(c);
            if (!c.has_limit()) continue;
            add_mpi(c);
            add_peers(c);
        }
    }
    for (DType dtype : {DType::bf16, DType::f16, DType::f64})
        for (std::size_t bytes : {std::size_t{4096}, mib, 25 * mib}) {
            add_threads({"all_reduce", dtype, 2, bytes});
            add_mpi({"all_reduce", dtype, 2, bytes});
        }
    for (const char* collective : {"reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter"})
        for (int ranks : {2, 4, 6}) {
            add_threads({collective, DType::f32, ranks, 25 * mib});
            add_mpi({collective, DType::f32, ranks, 25 * mib});
        }
    for (int ranks : {2, 4, 6}) {
        add_threads({"barrier", DType::f32, ranks, 0});
        add_mpi({"barrier", DType::f32, ranks, 0});
    }
}

#if GRADSYNC_BENCH_TOOL
/// Runs one rank of the launcher's job. Without a launcher, this process is rank 0 and forks the others.
int measure_over_tcp(const tool::Options& o, gradsync::Job job) {
    const bool forks = job.size == 1;
    if (forks) job = {.size = o.ranks, .port = free_port()};
    for (int rank = 1; forks && job.rank == 0 && rank < o.ranks; ++rank) {
        const pid_t child = ::fork();
        if (child < 0) throw std::runtime_error("fork failed; give fewer --ranks");
        if (child > 0) continue;
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        job.rank = job.local_rank = rank;
    }
    gradsync::TcpRendezvous rendezvous(job);
    int code = tool::measure(gradsync::TcpBackend(rendezvous, {.shared_memory = !o.messages}), o, job.local_rank);
    for (int status = 0; forks && job.rank == 0 && ::wait(&status) > 0;)
        if (status != 0) code = 1;
    return code;
}

/// Becomes bench_mpi_collective if mpirun has started this process; otherwise becomes the mpirun that starts it.
[[noreturn]] void measure_over_mpi([[maybe_unused]] const tool::Options& o, [[maybe_unused]] const gradsync::Job& job,
                                   [[maybe_unused]] char** argv) {
#ifdef GRADSYNC_BENCH_MPIEXEC
    if (job.size > 1) {
        ::execv(path_of_helper("bench_mpi_collective").c_str(), argv);
    } else {
        std::string arguments;
        for (int i = 1; argv[i] != nullptr; ++i) arguments += " '" + std::string(argv[i]) + "'";
        const std::string command = "exec " + command_under_mpi(GRADSYNC_BENCH_MPIEXEC, o.ranks, "bench_mpi_collective", arguments);
        ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    }
    throw std::runtime_error("bench_mpi_collective cannot be started; build the target bench_all_reduce again");
#else
    tool::refuse(
        "--backend mpi: this program was built without MPI; install libopenmpi-dev and openmpi-bin, then configure and build again, or use "
        "--backend tcp");
#endif
}

int main_of_tool(int argc, char** argv, std::string_view backend) {
    gradsync::Job job;
    try {
        if (backend != "threads") job = gradsync::Job::from_environment();
        const tool::Options o = tool::parse(argc, argv, job);
        if (o.backend == "mpi") measure_over_mpi(o, job, argv);
        if (o.backend == "tcp") return measure_over_tcp(o, job);
        return gradsync::run_threads(o.ranks, [&](gradsync::ThreadBackend comm) { return tool::measure(comm, o, comm.rank()); })[0];
    } catch (const std::exception& e) {
        const auto* const error = dynamic_cast<const gradsync::Error*>(&e);
        const bool misused = error != nullptr && error->errc() == gradsync::Errc::invalid_argument;
        if (!misused || job.rank == 0) std::fprintf(stderr, "bench_all_reduce: %s\n", e.what());
        return misused ? 2 : 1;
    }
}
#endif

}  // namespace

int main(int argc, char** argv) {
#if GRADSYNC_BENCH_TOOL
    if (const std::string_view backend = tool::backend_of(argc, argv); !backend.empty()) return main_of_tool(argc, argv, backend);
#endif
    Flags flags(argc, argv);
    flags.take(contest_options);
    for (const std::string& text : flags.take_all("peer")) {
        const std::size_t end = text.find('=');
        if (end == text.npos || end == 0 || end + 1 == text.size()) {
            std::fprintf(stderr, "bench_all_reduce: --peer takes NAME=COMMAND, not '%s'\n", text.c_str());
            return 2;
        }
        peers.push_back({text.substr(0, end), text.substr(end + 1)});
    }
    add_all();
    return run_benchmarks(argc, argv);
}
