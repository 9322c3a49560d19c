// SPDX-License-Identifier: BSL-1.0
// MPICH's MPI_Allreduce of floats, in place, for bench_all_reduce, which starts it under MPICH's mpiexec:
//
//     bench_mpich_all_reduce BYTES SECONDS LEAST ROUNDS pin|no-pin
//
// Prints one sample a line: the contestant's name and the seconds for one call, the slowest rank's. A program of its
// own, as one process cannot have two MPIs.

#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "../buffers.hpp"
#include "../mpi_library.hpp"
#include "../mpi_ranks.hpp"

namespace {

using namespace bench;

void run(const std::vector<std::string>& arguments) {
    if (arguments.size() != 5) throw std::runtime_error("usage: bench_mpich_all_reduce BYTES SECONDS LEAST ROUNDS pin|no-pin");
    constexpr auto f32 = gradsync::DType::f32;
    const std::size_t bytes = std::strtoull(arguments[0].c_str(), nullptr, 10);
    const ContestOptions options = contest_options_of({arguments.begin() + 1, arguments.end()});
    const MpiRanks ranks;
    const gradsync::kernel::HostBuffer buffer(bytes);
    MpiLibrary blocking("all_reduce", f32, buffer.data(), bytes);
    MpiLibrary nonblocking("iall_reduce", f32, buffer.data(), bytes);
    const std::vector<std::string> names{"mpich_library", "mpich_library_nonblocking"};
    const std::vector<Contestant*> contestants{&blocking, &nonblocking};
    for (std::size_t c = 0; c < contestants.size(); ++c) {
        fill(buffer.data(), bytes, f32, static_cast<float>(ranks.rank + 1));
        contestants[c]->run(ranks.rank, 1);
        check_filled(buffer.data(), bytes, f32, sum_of_ranks(ranks.size), names[c]);
        fill(buffer.data(), bytes, f32, 0);
    }
    const ContestResult samples = take_part(ranks.rank, contestants, options, slowest_of_mpi_ranks);
    if (ranks.rank != 0) return;
    for (std::size_t c = 0; c < contestants.size(); ++c)
        for (double sample : samples[c].seconds) std::printf("%s %.9e\n", names[c].c_str(), sample);
}

}  // namespace

int main(int argc, char** argv) { return main_of_mpi_helper(argc, argv, run); }
