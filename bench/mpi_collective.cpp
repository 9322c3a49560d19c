// SPDX-License-Identifier: BSL-1.0
// One collective of ranks that are processes, for bench_all_reduce, which starts it under mpirun:
//
//     bench_mpi_collective COLLECTIVE DTYPE BYTES SECONDS LEAST ROUNDS pin|no-pin
//     bench_mpi_collective --backend mpi ...     as bench_all_reduce does it
//
// In turns, as everywhere: MpiBackend and the MPI library, and, among threads of rank 0 while the other ranks sleep,
// what they are compared with. Prints one sample a line: the contestant's name and the seconds for one call, the
// slowest rank's.

#include <gradsync/backend/mpi.hpp>  // first: it includes mpi.h without the C++ bindings

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <gradsync/core/packed.hpp>

#include "among_threads.hpp"
#include "buffers.hpp"
#include "collectives.hpp"
#include "limit_loop.hpp"
#include "mpi_library.hpp"
#include "mpi_ranks.hpp"
#if GRADSYNC_BENCH_TOOL
#include "all_reduce_tool.hpp"
#endif

namespace {

using namespace bench;
using gradsync::DType;
using gradsync::MpiBackend;

/// At least one page.
std::size_t in_pages(std::size_t bytes) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    return (bytes / page + 1) * page;
}

/// Memory as a trainer maps it for an arena.
void* map_pages(std::size_t bytes) {
    void* const data = ::mmap(nullptr, in_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::runtime_error("mmap failed");
    return data;
}

struct Entry {
    std::string name;
    std::unique_ptr<Contestant> contestant;
};

void run(const std::vector<std::string>& arguments) {
    if (arguments.size() != 7)
        throw std::runtime_error("usage: bench_mpi_collective COLLECTIVE DTYPE BYTES SECONDS LEAST ROUNDS pin|no-pin");
    const std::string& collective = arguments[0];
    const DType dtype = dtype_of(arguments[1]);
    const std::size_t bytes = std::strtoull(arguments[2].c_str(), nullptr, 10);
    ContestOptions options = contest_options_of({arguments.begin() + 3, arguments.end()});
    options.warm_ups = bytes < std::size_t{512} << 20 ? 6 : 1;  // 3 are too few at 25 MiB; no cache holds the largest
    const MpiRanks ranks;
    const bool sums = collective == "all_reduce";

    MpiBackend sharing(MPI_COMM_WORLD);
    MpiBackend sending(MPI_COMM_WORLD, {.shared_memory = false});
    const auto shared = sharing.allocate(bytes);
    void* const mapped = map_pages(bytes);
    const auto adopted = gradsync::adopt(sharing, std::span(static_cast<unsigned char*>(mapped), in_pages(bytes)));
    const auto ordinary = sending.allocate(bytes);  // as good as memory of one process gets: for all others
    const auto over = [&](const MpiBackend& comm, void* buffer) {
        return std::make_unique<OverBackend<MpiBackend>>(collective, dtype, comm, buffer, bytes);
    };
    std::vector<Entry> entries;
    entries.push_back({"mpi", over(sharing, shared.data())});
    entries.push_back({"mpi_adopted", over(sharing, mapped)});
    entries.push_back({"mpi_borrowed", over(sharing, ordinary.data())});
    entries.push_back({"mpi_messages", over(sending, ordinary.data())});
    if (MpiLibrary::has(dtype)) {
        entries.push_back({"mpi_library", std::make_unique<MpiLibrary>(collective, dtype, ordinary.data(), bytes)});
        if (sums)
            entries.push_back({"mpi_library_nonblocking", std::make_unique<MpiLibrary>("iall_reduce", dtype, ordinary.data(), bytes)});
    }
    for (std::size_t e = 0; sums && e < entries.size(); ++e) {
        void* const buffer = e == 0 ? shared.data() : e == 1 ? mapped : ordinary.data();
        fill(buffer, bytes, dtype, static_cast<float>(ranks.rank + 1));
        entries[e].contestant->run(ranks.rank, 1);
        check_filled(buffer, bytes, dtype, sum_of_ranks(ranks.size), entries[e].name);
        fill(buffer, bytes, dtype, 0);
    }

    Buffers buffers(ranks.size, ranks.rank == 0 ? bytes : 0);
    ThreadsCollective threads(collective, dtype, buffers.pointers(), buffers.bytes());
    LimitLoop limit(buffers.pointers(), buffers.bytes());
    const bool limited = sums && LimitLoop::supports(ranks.size);
    if (ranks.rank == 0 && sums) {
        buffers.check_sum(threads, dtype, "threads");
        if (limited) buffers.check_sum(limit, DType::f32, "limit");
    }
    entries.push_back({"threads", std::make_unique<AmongThreads>(threads, ranks.size, options.pin)});
    if (limited) entries.push_back({"limit", std::make_unique<AmongThreads>(limit, ranks.size, options.pin)});

    std::vector<Contestant*> contestants;
    for (const Entry& entry : entries) contestants.push_back(entry.contestant.get());
    const ContestResult samples = take_part(ranks.rank, contestants, options, slowest_of_mpi_ranks);
    if (ranks.rank != 0) return;
    for (std::size_t e = 0; e < entries.size(); ++e)
        for (double sample : samples[e].seconds) std::printf("%s %.9e\n", entries[e].name.c_str(), sample);
}

}  // namespace

int main(int argc, char** argv) {
#if GRADSYNC_BENCH_TOOL
    if (!tool::backend_of(argc, argv).empty())
        return main_of_mpi_helper(argc, argv, [&](const std::vector<std::string>&) {
            const gradsync::Job job = gradsync::Job::from_environment();
            const tool::Options o = tool::parse(argc, argv, job);
            const MpiBackend comm(MPI_COMM_WORLD, {.shared_memory = !o.messages});
            if (comm.size() != o.ranks) tool::refuse("--backend mpi: MPI did not start these ranks; start them with mpirun or srun");
            if (tool::measure(comm, o, job.size == comm.size() ? job.local_rank : comm.rank()) != 0)
                throw std::runtime_error("elements were wrong: see the last column");
        });
#endif
    return main_of_mpi_helper(argc, argv, run);
}
