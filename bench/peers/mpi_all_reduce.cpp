// SPDX-License-Identifier: BSL-1.0
// Another MPI's MPI_Allreduce of floats, in place, for bench_all_reduce --peer. A program of its own, as one process
// cannot have two MPIs:
//
//     mpiexec -n RANKS mpi_all_reduce NAME BYTES SECONDS LEAST ROUNDS pin|no-pin

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
    if (arguments.size() != 6) throw std::runtime_error("usage: mpi_all_reduce NAME BYTES SECONDS LEAST ROUNDS pin|no-pin");
    constexpr auto f32 = gradsync::DType::f32;
    const std::size_t bytes = std::strtoull(arguments[1].c_str(), nullptr, 10);
    const MpiRanks ranks;
    const gradsync::kernel::HostBuffer buffer(bytes);
    MpiLibrary library("all_reduce", f32, buffer.data(), bytes);
    fill(buffer.data(), bytes, f32, static_cast<float>(ranks.rank + 1));
    library.run(ranks.rank, 1);
    check_filled(buffer.data(), bytes, f32, sum_of_ranks(ranks.size), arguments[0]);
    fill(buffer.data(), bytes, f32, 0);
    Contestant* const contestants[] = {&library};
    const ContestResult samples =
        take_part(ranks.rank, contestants, contest_options_of({arguments.begin() + 2, arguments.end()}), slowest_of_mpi_ranks);
    if (ranks.rank != 0) return;
    for (double sample : samples[0].seconds) std::printf("%s %.9e\n", arguments[0].c_str(), sample);
}

}  // namespace

int main(int argc, char** argv) { return main_of_mpi_helper(argc, argv, run); }
