// SPDX-License-Identifier: BSL-1.0
#pragma once
// bench_all_reduce --backend: one backend over many sizes, in the columns of nccl-tests' all_reduce_perf.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include <gradsync/bootstrap/job.hpp>
#include <gradsync/core/packed.hpp>
#include <gradsync/kernel/host_buffer.hpp>

#include "buffers.hpp"
#include "collectives.hpp"
#include "contest.hpp"
#include "numbers.hpp"

namespace bench::tool {

using gradsync::DType;
using gradsync::ReduceOp;

struct Options {
    std::string backend, dtype = "f32", op = "sum";
    int ranks = 0, iterations = 20, warmup = 1;
    std::size_t min_bytes = std::size_t{4} << 10, max_bytes = std::size_t{64} << 20, factor = 4;
    bool borrowed = false, messages = false, no_pin = false;
};

[[noreturn]] inline void refuse(const std::string& why) { throw gradsync::Error(gradsync::Errc::invalid_argument, why); }

/// The backend on the command line. If it is empty, the program runs Google Benchmark.
inline std::string_view backend_of(int argc, char** argv) {
    constexpr std::string_view flag = "--backend";
    for (int i = 1; i < argc; ++i) {
        const std::string_view argument = argv[i];
        if (argument == flag) return i + 1 < argc ? argv[i + 1] : "?";
        if (argument.starts_with("--backend=")) return argument.substr(flag.size() + 1);
    }
    return {};
}

/// Throws Error(invalid_argument) for bad input, and ends the program after --help. If a launcher has started several ranks, `job` sets
/// their number.
inline Options parse(int argc, char** argv, const gradsync::Job& job) {
    using gradsync_examples::within;
    Options o;
    CLI::App app{
        "Measures all-reduces of several sizes over one backend and prints the columns of nccl-tests' all_reduce_perf.\n"
        "\n"
        "  bench_all_reduce --backend tcp --ranks 4\n"
        "  bench_all_reduce --backend mpi --min-bytes 1M --max-bytes 1G --dtype bf16 --borrowed\n"
        "  torchrun --no-python --nproc-per-node 2 --nnodes 2 ... bench_all_reduce --backend tcp\n"
        "\n"
        "Without --backend the program takes Google Benchmark's options.\n"};
    app.name("bench_all_reduce")->option_defaults()->always_capture_default();
    for (const char* type : {"UINT", "INT"}) app.get_formatter()->label(type, "N");
    const CLI::Validator size{[](std::string& text) -> std::string {
                                  std::string bytes = text;
                                  try {
                                      if (CLI::AsSizeValue(false)(bytes).empty() &&
                                          gradsync_examples::is_number(bytes, std::uint64_t{1}, std::uint64_t{1} << 40)) {
                                          text = bytes;
                                          return {};
                                      }
                                  } catch (const CLI::ValidationError&) {  // our message is shorter
                                  }
                                  return "'" + text + "' is not a size from 1 to 1T; give bytes, or K, M or G of them, as in 4K or 64MiB";
                              },
                              "SIZE"};
    app.add_option("--backend", o.backend, "threads, tcp or mpi; tcp and mpi share memory on one machine")
        ->check(CLI::IsMember({"threads", "tcp", "mpi"}));
    app.add_option("--ranks", o.ranks, "number of ranks to start [2; under torchrun, srun or mpirun: all that it has started]")
        ->check(within(1, 1024))
        ->default_str("");
    app.add_option("--min-bytes", o.min_bytes, "smallest buffer")->transform(size)->default_str("4K");
    app.add_option("--max-bytes", o.max_bytes, "largest buffer")->transform(size)->default_str("64M");
    app.add_option("--factor", o.factor, "each size over the one before it")->check(within(std::size_t{2}, std::size_t{1} << 20));
    app.add_option("--iterations", o.iterations, "timed batches for each size: calls in a row, for 0.3 ms or one call")
        ->check(within(1, 1'000'000));
    app.add_option("--warmup", o.warmup, "calls before each batch that do not count")->check(within(0, 1'000'000));
    app.add_option("--dtype", o.dtype, "element type")->check(CLI::IsMember({"f32", "f64", "bf16", "f16"}));
    app.add_option("--op", o.op, "reduction")->check(CLI::IsMember({"sum", "mean", "min", "max", "product"}));
    app.add_flag("--borrowed", o.borrowed, "buffers in ordinary memory instead of memory of allocate()");
    app.add_flag("--messages", o.messages, "send messages on one machine, too, instead of sharing memory");
    app.add_flag("--no-pin", o.no_pin, "let ranks move between cores");
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        if (job.rank == 0) std::fputs(app.help().c_str(), stdout);
        std::exit(0);
    } catch (const CLI::ParseError& error) {
        refuse(std::string(error.what()) + "; see --backend tcp --help");
    }
    if (o.backend == "threads" && (o.borrowed || o.messages))
        refuse(std::string(o.borrowed ? "--borrowed" : "--messages") +
               " is for processes, and threads share all memory; leave it out, or use --backend tcp");
    if (o.min_bytes < size_of(dtype_of(o.dtype))) refuse("--min-bytes is less than one element of --dtype " + o.dtype + "; give more");
    if (o.max_bytes < o.min_bytes) refuse("--max-bytes is less than --min-bytes; give more");
    if (job.size > 1 && o.ranks != 0 && o.ranks != job.size)
        refuse("--ranks is " + std::to_string(o.ranks) + ", but the launcher has started " + std::to_string(job.size) + "; leave it out");
    if (o.ranks == 0) o.ranks = job.size > 1 ? job.size : 2;
    return o;
}

/// The elements that `rank` contributes, or the expected result for rank -1. Ranks contribute powers of two, whose sums and products are
/// exact in any order. Rank 0's differ from the cycle of the others, so that the result varies from element to element. The period is
/// prime, so that a piece in the wrong place does not match.
inline std::vector<std::byte> values(DType dtype, ReduceOp op, int ranks, int rank) {
    std::vector<double> all(1021);
    for (std::uint32_t i = 0; i < all.size(); ++i) {
        const std::uint32_t hash = i * 2654435761U >> 16;
        const auto of = [&](int r) { return std::to_array({0.5, 1.0, 2.0})[(r == 0 ? hash / 3 : hash + static_cast<unsigned>(r)) % 3]; };
        all[i] = of(std::max(rank, 0));
        for (int r = 1; rank < 0 && r < ranks; ++r)
            all[i] = op == ReduceOp::min       ? std::min(all[i], of(r))
                     : op == ReduceOp::max     ? std::max(all[i], of(r))
                     : op == ReduceOp::product ? all[i] * of(r)
                                               : all[i] + of(r);
        if (rank < 0 && op == ReduceOp::mean)  // as the library: times the reciprocal, in the accumulator's precision
            all[i] = dtype == DType::f64 ? all[i] * (1.0 / ranks) : static_cast<float>(all[i]) * static_cast<float>(1.0 / ranks);
    }
    return pattern(dtype, all);
}

/// Measures all sizes on one rank, which is pinned to `core`. Rank 0 prints. Returns the exit code, 1 if any element was wrong.
template <class Backend>
int measure(Backend comm, const Options& o, int core) {
    const DType dtype = dtype_of(o.dtype);
    using enum ReduceOp;
    const ReduceOp op = find_named(o.op, {sum, mean, min, max, product});
    const auto over_ranks = [&](double value, ReduceOp reduction) {
        comm.all_reduce(gradsync::buffer(std::span(&value, 1)), reduction).wait();
        return value;
    };
    const ContestOptions contest{.rounds = o.iterations, .pin = !o.no_pin, .warm_ups = o.warmup};
    const bool prints = comm.rank() == 0;
    if (prints)
        std::printf(
            "# bench_all_reduce --backend %s: %d ranks, %d iterations, warm-up %d, %s memory; medians, of the slowest rank\n"
            "# %s\n#\n"
            "#%11s %12s %8s %8s %11s %8s %8s %7s\n#%11s %12s %8s %8s %11s %8s %8s\n",
            o.backend.c_str(), comm.size(), o.iterations, o.warmup, o.borrowed ? "borrowed" : "allocate()'s",
            std::string(comm.describe()).c_str(), "size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong", "(B)", "(elements)",
            "", "", "(us)", "(GB/s)", "(GB/s)");
    double all_wrong = 0;
    for (std::size_t size = o.min_bytes; size <= o.max_bytes; size *= o.factor) {
        const std::size_t count = size / size_of(dtype), bytes = count * size_of(dtype);
        const auto allocated = comm.allocate(o.borrowed ? 0 : bytes);
        const gradsync::kernel::HostBuffer ordinary(o.borrowed ? bytes : 0);
        void* const data = o.borrowed ? ordinary.data() : allocated.data();
        OverBackend<Backend> all_reduce("all_reduce", dtype, comm, data, bytes, op);
        fill(data, bytes, values(dtype, op, comm.size(), comm.rank()));
        all_reduce.run(core, 1);
        const double wrong =
            over_ranks(static_cast<double>(count_wrong(data, bytes, dtype, values(dtype, op, comm.size(), -1))), ReduceOp::sum);
        all_wrong += wrong;
        fill(data, bytes, dtype, 0);
        Contestant* const contestants[] = {&all_reduce};
        const double seconds =
            summarise(take_part(core, contestants, contest, [&](double own) { return over_ranks(own, ReduceOp::max); })[0].seconds).median;
        const double bandwidth = static_cast<double>(bytes) / seconds / 1e9;
        if (prints)
            std::printf("%12zu %12zu %8s %8s %11.2f %8.3f %8.3f %7.0f\n", bytes, count, o.dtype.c_str(), o.op.c_str(), seconds * 1e6,
                        bandwidth, bandwidth * bus_factor("all_reduce", comm.size()), wrong);
        std::fflush(stdout);
    }
    return all_wrong == 0 ? 0 : 1;
}

}  // namespace bench::tool
