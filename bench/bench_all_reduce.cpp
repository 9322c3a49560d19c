// The library's collectives against the bandwidth limit and against its peers.
//
//     bench_all_reduce [--seconds=S] [--gib] [--no-pin] [Google Benchmark's flags]
//
// Benchmarks are named WHO/COLLECTIVE/DTYPE/ranks:N/bytes:B. WHO is of the library
//
//     threads                   ThreadBackend
//     mpi                       MpiBackend, ranks that share memory, on buffers that it has allocated
//     mpi_borrowed              the same on ordinary memory
//     mpi_messages              MpiBackend, ranks that send messages, on buffers that it has allocated
//
// and else
//
//     limit                     a bare loop: see limit_loop.hpp
//     gloo                      Gloo, where it was found at build time
//     mpi_library               the MPI library's MPI_Allreduce, where it was found
//     mpi_library_nonblocking   its MPI_Iallreduce and MPI_Wait
//
// Times are medians. Counters: bytes; algbw and busbw, bytes a second as nccl-tests counts them; WHO_ratio, that one's
// time over this one's, measured in turns with it (mpi_library_best_ratio: of the library's two the faster one's);
// time_min and time_max in seconds; handoff_ns, the state of the machine.

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <deque>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "buffers.hpp"
#include "collectives.hpp"
#include "limit_loop.hpp"
#include "reporting.hpp"
#if GRADSYNC_BENCH_GLOO
#include "gloo_all_reduce.hpp"
#endif
#if GRADSYNC_BENCH_MPI
#include "mpi_contest.hpp"
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
    bool has_limit() const { return collective == "all_reduce" && LimitLoop::supports(ranks); }
};

/// What came out of a contest.
struct Measured {
    std::map<std::string, Summary> of;  ///< by contestant
    double handoff = 0;
};

/// Runs `contestant` in turns with the limit.
Measured against_limit(const Case& c, Buffers& buffers, const std::string& who, Contestant& contestant) {
    LimitLoop limit(buffers.pointers(), c.bytes);
    if (c.collective == "all_reduce") buffers.check_sum(contestant, c.dtype, "all_reduce");
    std::vector<Contestant*> contestants{&contestant};
    if (c.has_limit()) {
        buffers.check_sum(limit, DType::f32, "limit");
        contestants.push_back(&limit);
    }
    const double before = handoff_latency();
    const ContestResult samples = run_contest(c.ranks, contestants, contest_options);
    Measured measured{{{who, summarise(samples[0])}}, (before + handoff_latency()) / 2};
    if (c.has_limit()) measured.of["limit"] = summarise(samples[1]);
    return measured;
}

Measured measure_threads(const Case& c) {
    Buffers buffers(c.ranks, c.bytes);
    ThreadsCollective threads(c.collective, c.dtype, buffers.pointers(), c.bytes);
    return against_limit(c, buffers, "threads", threads);
}

#if GRADSYNC_BENCH_GLOO
Measured measure_gloo(const Case& c) {
    Buffers buffers(c.ranks, c.bytes);
    GlooAllReduce gloo(buffers.pointers(), c.bytes);
    return against_limit(c, buffers, "gloo", gloo);
}
#endif

#if GRADSYNC_BENCH_MPI
Measured measure_mpi(const Case& c) {
    const double before = handoff_latency();
    ContestOptions options = contest_options;
    options.seconds *= 3;  // there are seven of them
    const auto samples = mpi_contest(c.ranks, c.bytes, options);
    Measured measured{{}, (before + handoff_latency()) / 2};
    for (const auto& [who, seconds] : samples) measured.of[who] = summarise(seconds);
    return measured;
}
#endif

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
    for (const char* name : {"limit", "threads", "mpi_library"})
        if (other(name)) state.counters[name + std::string("_ratio")] = other(name)->median / own.median;
    if (other("limit")) state.counters["limit_ratio_of_minima"] = other("limit")->min / own.min;
    const Summary *blocking = other("mpi_library"), *nonblocking = other("mpi_library_nonblocking");
    if (blocking && nonblocking)
        state.counters["mpi_library_best_ratio"] = std::min(blocking->median, nonblocking->median) / own.median;
}

/// A contest is the measurement of all its contestants: whichever is asked for first runs it, and the others report the
/// same one.
class SharedContests {
public:
    template <class Measure>
    Measured take(const Case& c, const std::vector<std::string>& contestants, const std::string& who, Measure measure) {
        auto& own = left_[{c.name(), who}];
        if (own.empty()) {
            const Measured measured = measure(c);
            for (const std::string& each : contestants) left_[{c.name(), each}].push_back(measured);
        }
        const Measured measured = own.front();
        own.pop_front();
        return measured;
    }

private:
    std::map<std::pair<std::string, std::string>, std::deque<Measured>> left_;
};
SharedContests shared_contests;

/// A benchmark for each of the contestants in what `measure` runs.
template <class Measure>
void add(const std::vector<std::string>& contestants, const Case& c, Measure measure) {
    for (const std::string& who : contestants)
        benchmark::RegisterBenchmark((who + "/" + c.name()).c_str(),
                                     [=](benchmark::State& state) {
                                         try {
                                             const Measured measured =
                                                 shared_contests.take(c, contestants, who, measure);
                                             report_case(state, c, who, measured);
                                         } catch (const std::exception& e) {
                                             state.SkipWithError(e.what());
                                         }
                                     })
            ->UseManualTime()
            ->Iterations(1)
            ->Unit(benchmark::kMicrosecond);
}

void add_threads(const Case& c) {
    if (c.has_limit()) add({"threads", "limit"}, c, measure_threads);
    else add({"threads"}, c, measure_threads);
}

void add_all(bool gib) {
    constexpr std::size_t mib = std::size_t{1} << 20;
    std::vector<std::size_t> sizes{4096, 65536, mib, 10 * mib, 25 * mib, 100 * mib};
    if (gib) sizes.push_back(1024 * mib);
    for (int ranks : {1, 2, 4})
        for (std::size_t bytes : sizes) {
            const Case c{"all_reduce", DType::f32, ranks, bytes};
            add_threads(c);
            if (!c.has_limit()) continue;
#if GRADSYNC_BENCH_GLOO
            add({"gloo"}, c, measure_gloo);
#endif
#if GRADSYNC_BENCH_MPI
            add({"mpi", "mpi_borrowed", "mpi_messages", "mpi_library", "mpi_library_nonblocking"}, c, measure_mpi);
#endif
        }
    for (DType dtype : {DType::bf16, DType::f64})
        for (std::size_t bytes : {std::size_t{4096}, mib, 25 * mib}) add_threads({"all_reduce", dtype, 2, bytes});
    for (const char* collective : {"reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter"})
        for (int ranks : {2, 4}) add_threads({collective, DType::f32, ranks, 25 * mib});
    for (int ranks : {2, 4}) add_threads({"barrier", DType::f32, ranks, 0});
}

}  // namespace

int main(int argc, char** argv) {
    bool gib = false;
    int kept = 1;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument == "--gib") gib = true;
        else if (argument == "--no-pin") contest_options.pin = false;
        else if (argument.rfind("--seconds=", 0) == 0) contest_options.seconds = std::strtod(argv[i] + 10, nullptr);
        else argv[kept++] = argv[i];
    }
    add_all(gib);
    return run_benchmarks(kept, argv);
}
