// The library's collectives against the bandwidth limit and against its peers.
//
//     bench_all_reduce [--seconds=S] [--gib] [--no-pin] [Google Benchmark's flags]
//
// Benchmarks are named WHO/COLLECTIVE/DTYPE/ranks:N/bytes:B, where WHO is `threads` (gradsync's ThreadBackend), `limit`
// (a bare loop: see limit_loop.hpp), `gloo` or `mpi_library` (where they were found at build time). Times are medians.
// Counters: bytes; algbw and busbw, bytes a second as nccl-tests counts them; limit_ratio, the limit's time over this
// one's, measured in turns with it; time_min and time_max in seconds; handoff_ns, the state of the machine.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "buffers.hpp"
#include "collectives.hpp"
#include "limit_loop.hpp"
#include "reporting.hpp"
#if GRADSYNC_BENCH_GLOO
#include "gloo_all_reduce.hpp"
#endif
#if GRADSYNC_BENCH_MPI
#include "mpi_peer.hpp"
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

struct Measured {
    Summary own;
    Summary limit;  ///< empty where there is none
    double handoff = 0;
};

/// Runs `contestant` in turns with the limit.
Measured against_limit(const Case& c, Buffers& buffers, Contestant& contestant) {
    LimitLoop limit(buffers.pointers(), c.bytes);
    if (c.collective == "all_reduce") buffers.check_sum(contestant, c.dtype, "all_reduce");
    std::vector<Contestant*> contestants{&contestant};
    if (c.has_limit()) {
        buffers.check_sum(limit, DType::f32, "limit");
        contestants.push_back(&limit);
    }
    const double before = handoff_latency();
    const ContestResult samples = run_contest(c.ranks, contestants, contest_options);
    Measured measured{summarise(samples[0]), {}, (before + handoff_latency()) / 2};
    if (c.has_limit()) measured.limit = summarise(samples[1]);
    return measured;
}

Measured measure_threads(const Case& c) {
    Buffers buffers(c.ranks, c.bytes);
    ThreadsCollective threads(c.collective, c.dtype, buffers.pointers(), c.bytes);
    return against_limit(c, buffers, threads);
}

#if GRADSYNC_BENCH_GLOO
Measured measure_gloo(const Case& c) {
    Buffers buffers(c.ranks, c.bytes);
    GlooAllReduce gloo(buffers.pointers(), c.bytes);
    return against_limit(c, buffers, gloo);
}
#endif

#if GRADSYNC_BENCH_MPI
/// MPI's ranks are other processes, which spin while they wait: the limit is measured between three runs of them.
Measured measure_mpi(const Case& c) {
    Buffers buffers(c.ranks, c.bytes);
    LimitLoop limit(buffers.pointers(), c.bytes);
    Contestant* contestants[] = {&limit};
    std::vector<double> own, limits;
    ContestOptions part_options = contest_options;
    part_options.seconds /= 6;
    part_options.least_rounds = 5;
    const double before = handoff_latency();
    for (int part = 0; part < 3; ++part) {
        const ContestResult of_limit = run_contest(c.ranks, contestants, part_options);
        limits.insert(limits.end(), of_limit[0].begin(), of_limit[0].end());
        const std::vector<double> of_mpi = mpi_samples(c.ranks, c.bytes, part_options.seconds);
        own.insert(own.end(), of_mpi.begin(), of_mpi.end());
    }
    return {summarise(own), summarise(limits), (before + handoff_latency()) / 2};
}
#endif

void report_case(benchmark::State& state, const Case& c, const Summary& own, const Measured& measured) {
    report(state, own, measured.handoff);
    const double bandwidth = static_cast<double>(c.bytes) / own.median;
    state.counters["bytes"] = static_cast<double>(c.bytes);
    state.counters["algbw"] = bandwidth;
    state.counters["busbw"] = bandwidth * bus_factor(c.collective, c.ranks);
    if (measured.limit.count != 0) {
        state.counters["limit_ratio"] = measured.limit.median / own.median;
        state.counters["limit_ratio_of_minima"] = measured.limit.min / own.min;
    }
}

/// The contest between the library and the limit is the measurement of both: whichever is asked for first runs it,
/// and the other reports the same one.
class SharedContests {
public:
    Measured take(const Case& c, bool limit) {
        auto& own = left_[{c.name(), limit}];
        if (own.empty()) {
            const Measured measured = measure_threads(c);
            own.push_back(measured);
            left_[{c.name(), !limit}].push_back(measured);
        }
        const Measured measured = own.front();
        own.pop_front();
        return measured;
    }

private:
    std::map<std::tuple<std::string, bool>, std::deque<Measured>> left_;
};
SharedContests shared_contests;

template <class Run>
void add(const std::string& who, const Case& c, Run run) {
    benchmark::RegisterBenchmark((who + "/" + c.name()).c_str(),
                                 [=](benchmark::State& state) {
                                     try {
                                         run(state);
                                     } catch (const std::exception& e) {
                                         state.SkipWithError(e.what());
                                     }
                                 })
        ->UseManualTime()
        ->Iterations(1)
        ->Unit(benchmark::kMicrosecond);
}

void add_threads(const Case& c) {
    add("threads", c, [=](benchmark::State& state) {
        const Measured measured = shared_contests.take(c, false);
        report_case(state, c, measured.own, measured);
    });
}

void add_limit(const Case& c) {
    add("limit", c, [=](benchmark::State& state) {
        const Measured measured = shared_contests.take(c, true);
        report_case(state, c, measured.limit, measured);
    });
}

template <class Measure>
void add_peer(const std::string& who, const Case& c, Measure measure) {
    add(who, c, [=](benchmark::State& state) {
        const Measured measured = measure(c);
        report_case(state, c, measured.own, measured);
    });
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
            add_limit(c);
#if GRADSYNC_BENCH_GLOO
            add_peer("gloo", c, measure_gloo);
#endif
#if GRADSYNC_BENCH_MPI
            add_peer("mpi_library", c, measure_mpi);
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
